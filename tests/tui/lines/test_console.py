"""What a terminal shows, at the widths terminals have."""

import io
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from read_records import reduce_all, typed
from rich.cells import cell_len
from rich.console import Console

from xtrain.tui.lines.lasting import ASCII, progress_line, spark
from xtrain.tui.lines.plain import PlainView
from xtrain.tui.lines.view import ConsoleView
from xtrain.tui.state import RunState, reduce

WIDTHS = [60, 80, 120, 200]
CONTROL = re.compile(r"\x1b\[\??[0-9;]*[A-Za-z]")


class Clock:
    now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


class Screen:
    """A console view on a terminal of text, every record drawn as it comes."""

    def __init__(self, width: int, *, no_color: bool = False) -> None:
        self.out = io.StringIO()
        self.console = Console(
            file=self.out, width=width, force_terminal=True, color_system="standard", no_color=no_color, highlight=False
        )
        self.clock = Clock()
        self.view = ConsoleView(self.console, Path("runs/shakespeare-e4f5a6"), clock=self.clock)
        self.state = RunState()

    def play(self, records, *, close: bool = False) -> "Screen":
        for record in map(typed, records):
            self.state = reduce(self.state, record)
            if record.time is not None:
                self.clock.now = record.time
            if self.view.shows(record):
                self.view.draw(self.state, record)
            self.view.refresh(self.state)
        if close:
            self.view.close(self.state)
        return self

    @property
    def lines(self) -> list[str]:
        """Every line ever drawn, a redrawn one each time."""
        return re.split("[\r\n]+", CONTROL.sub("", self.out.getvalue()))

    @property
    def moving(self) -> str:
        """The moving line as it stands."""
        return self.lines[-2]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_wider_than_the_terminal(width: int, recorded, failed) -> None:
    for records in (recorded, failed):
        lines = Screen(width).play(records, close=True).lines
        assert max(cell_len(line) for line in lines) <= width
        # The moving line leaves the last column free, or some terminals would wrap it.
        assert all(cell_len(line) < width for line in lines if "━" in line or "──  " in line)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_line_keeps_what_matters(width: int, recorded) -> None:
    screen = Screen(width).play([r for r in recorded if r["step"] <= 180])
    line = screen.moving
    assert "180/600" in line and "loss 3.1000" in line and "12.3k tok/s" in line and "5m57s left" in line
    assert ("lr 3.00e-03" in line) == (width >= 80)
    assert ("stable" in line) == (width >= 120)
    assert "━" in line and "─" in line


def test_the_line_is_cut_on_a_very_narrow_terminal(recorded) -> None:
    for width in (10, 20, 40):
        assert cell_len(Screen(width).play([r for r in recorded if r["step"] <= 180]).moving) < width


def test_the_line_follows_a_resize(recorded) -> None:
    screen = Screen(120).play([r for r in recorded if r["step"] <= 180])
    for width in (60, 200, 45):
        screen.console.width = width
        screen.view.refresh(screen.state)
        assert width - 80 < cell_len(screen.moving) < width
        assert "180/600" in screen.moving


def test_start_up_builds_up_line_by_line(recorded) -> None:
    screen = Screen(80).play(recorded[:4])
    assert "bootstrap" not in screen.out.getvalue().rpartition("✓")[0]  # it took less than a second
    assert " weights  0s" in screen.moving
    screen.clock.now += 7
    screen.view.refresh(screen.state)
    assert " weights  7s" in screen.moving
    screen.play(recorded[4:6])
    assert re.search(r"^ ✓ weights +12\.3 s  initialised from seed 42$", "\n".join(map(str.rstrip, screen.lines)), re.M)
    assert "ready in 13.0 s" in screen.out.getvalue().replace("\x1b[1m", "").replace("\x1b[0m", "")
    assert "waiting for the first step" in screen.moving


def test_the_detail_of_a_start_is_folded_and_not_cut(event) -> None:
    detail = "/".join(f"folder{number}" for number in range(30))
    lines = Screen(60).play([event("setup", 1, 0, node="setup.weights", seconds=1.0, detail=detail)]).lines
    assert detail in "".join("".join(lines).split())


def test_ticks_stay_above_the_line(recorded) -> None:
    text = "\n".join(line.rstrip() for line in Screen(100).play(recorded).lines)
    assert " step 120  eval        held[bold]out  loss 2.0000  ppl 7.39  65.5k tokens, 1.00 s\n" in text
    assert " step 120  checkpoint  saved in 0.41 s  143.1 MiB  checkpoints/step-120\n" in text
    assert "╭─ step 120 · sample ──" in text and "│ What �[31mlight� 猫" in text
    assert " step 120  warning     the loader is slow\n                       raise data.workers\n" in text
    assert " step 180  nonfinite   loss nan  grad_norm inf\n" in text


def test_a_long_sample_is_cut(event) -> None:
    sample = {"prompt": "p", "text": "\nline" * 40}
    lines = Screen(80).play([event("generate", 1, 1, samples=[sample])]).lines
    assert sum(line.startswith("│ line") for line in lines) == 11
    assert any("… 29 more lines in events.jsonl" in line for line in lines)


def test_summary_of_a_run_that_is_done(recorded) -> None:
    text = "\n".join(line.rstrip(" │") for line in Screen(100).play(recorded, close=True).lines)
    summary = text[text.index("╭─ done ─") :]
    assert "│ steps     600 of 600\n" in summary
    assert re.search(r"│ loss      1\.0000  [▁-█]{10}\n", summary)
    assert "│ held out  held[bold]out  loss 2.0000  ppl 7.39  at step 120\n" in summary
    assert "│ tokens    6.0M  11.8k tok/s\n" in summary
    assert "│ time      8m50s\n" in summary
    assert "│ note      1 skipped step, 1 non-finite step, 1 warning\n" in summary
    assert "│ run       runs/shakespeare-e4f5a6\n" in summary
    assert ' next  xtrain generate runs/shakespeare-e4f5a6 --prompt "…"\n' in summary


def test_a_command_too_long_for_the_line_is_still_one_command(recorded) -> None:
    text = "\n".join(Screen(54).play(recorded, close=True).lines)
    assert ' next  xtrain generate runs/shakespeare-e4f5a6 \\\n           --prompt "…"' in text


def test_summary_of_a_failure(failed) -> None:
    text = "\n".join(line.rstrip(" │") for line in Screen(80).play(failed, close=True).lines)
    assert "step 180  ✗ failure   rank 2  RuntimeError: boom" in text
    assert "╭─ rank 2 failed ─" in text and "│   line\n│ RuntimeError: boom\n" in text
    assert "╭─ failed · rank 2 at step 180 ─" in text
    assert "│ logs      runs/shakespeare-e4f5a6/logs\n" in text
    assert " next  run the same command again to resume from step 120\n" in text


@pytest.mark.parametrize(("records", "expected"), [
    ([("signal", {"name": "SIGTERM"}), ("run_end", {"status": "stopped"})], "stopped · by SIGTERM"),
    ([("run_end", {"status": "interrupted"})], "interrupted"),
    ([("run_end", {"status": "complete"})], "complete · nothing was left to do"),
    ([("setup_begin", {"node": "setup.weights"})], "starting · the run ended without reporting a reason"),
    ([("run_end", {"status": "done [/]"})], "done [/]"),
])  # fmt: skip
def test_other_ends(event, records, expected: str) -> None:
    played = [event(kind, at, 5, **fields) for at, (kind, fields) in enumerate(records)]
    assert f"╭─ {expected} ─" in "\n".join(Screen(80).play(played, close=True).lines)


def test_without_colour_done_and_to_do_still_differ(recorded) -> None:
    screen = Screen(80, no_color=True).play(recorded, close=True)
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]", screen.out.getvalue())
    assert any("━─" in line for line in screen.lines)


def test_no_line_moves_where_there_is_no_terminal(recorded) -> None:
    out = io.StringIO()
    view = ConsoleView(Console(file=out, width=80), Path("x"))
    state = reduce_all(RunState(), recorded[:9])
    view.refresh(state)
    assert out.getvalue() == ""


def test_unknown_number_of_steps_pulses(event, metrics) -> None:
    state = reduce_all(RunState(), [event("run_start", 0, steps=None), metrics(5, 1), metrics(6, 2)])
    lines = {progress_line(state, width=80, now=n / 10, quiet=0, glyphs=ASCII).plain for n in range(40)}
    assert len(lines) > 5
    pulse = max(line.count("=") for line in lines)
    assert pulse >= 2
    assert all("step 6  loss" in line and "1.00 s/step" in line and line.count("=") == pulse for line in lines)


def test_the_line_says_when_nothing_happens(event, metrics) -> None:
    state = reduce_all(RunState(), [event("run_start", 0, steps=9), metrics(1, 1), metrics(2, 4)])
    assert "left" in progress_line(state, width=80, now=0, quiet=14, glyphs=ASCII).plain
    assert "no step for 16s" in progress_line(state, width=80, now=0, quiet=16, glyphs=ASCII).plain
    stopping = reduce(state, typed(event("signal", 5, name="SIGTERM")))
    assert "SIGTERM, stopping" in progress_line(stopping, width=80, now=0, quiet=0).plain
    failing = reduce(state, typed(event("failure", 5, rank=1, error="", traceback="")))
    assert "rank 1 failed, waiting for the others" in progress_line(failing, width=80, now=0, quiet=0).plain


def test_spark() -> None:
    assert spark(((1, 1.0),)) == ""
    assert spark(tuple((n, float(-n)) for n in range(8))) == "█▇▆▅▄▃▂▁"
    assert spark(tuple((n, 2.0) for n in range(100))) == "▁" * 24


ODD = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers(), max_size=2)
)
FIELDS = [
    "step", "time", "loss", "tokens", "node", "seconds", "samples", "steps", "resumed_step", "status", "dataset",
    "path", "rank", "error", "traceback", "message", "lr", "bytes", "name", "shares", "lr_scale",
    "command", "state", "detail", "reason", "job", "step_seconds", "steps_left", "seconds_left", "measured_steps",
]  # fmt: skip
EVENTS = [
    "run_start", "setup_begin", "setup", "setup_done", "eval", "generate", "checkpoint", "signal", "nonfinite",
    "skipped", "warning", "failure", "run_end", "another", "phase", "tokenise", "rollback", "restart",
    "stop", "control", "paused", "requeue", "profile", "memory_snapshot", "estimate",
]  # fmt: skip
RECORDS = st.dictionaries(st.sampled_from(FIELDS), ODD, max_size=6)


@settings(max_examples=60, deadline=None)
@given(st.lists(RECORDS | st.builds(lambda r, e: {**r, "event": e}, RECORDS, st.sampled_from(EVENTS)), max_size=8))
def test_no_record_is_too_odd(records) -> None:
    """Whatever a file holds, every view draws it and none is wider than the terminal."""
    screen = Screen(80).play(records, close=True)
    assert max(cell_len(line) for line in screen.lines) <= 80
    plain = PlainView(io.StringIO(), Path("x"))
    for record in map(typed, records):
        plain.draw(screen.state, record)
    plain.close(screen.state)
