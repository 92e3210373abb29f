"""Following a run directory while it is written, and whatever happens to it or to the reader."""

import io
import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from xtrain.text.printing import Output
from xtrain.tui.lines.view import choose_ui, follow


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def write_slowly(append, directory: Path, records) -> threading.Thread:
    def write() -> None:
        time.sleep(0.15)
        for record in records:
            append(directory, record)
            time.sleep(0.01)

    thread = threading.Thread(target=write)
    thread.start()
    return thread


@pytest.mark.parametrize("ui", ["plain", "console", "json", "none"])
def test_follows_a_run_from_before_it_exists_to_its_end(ui, tmp_path: Path, append, recorded) -> None:
    out = io.StringIO()
    thread = write_slowly(append, tmp_path / "run", recorded)
    state = follow(tmp_path / "run", ui=ui, offsets=None, finished=threading.Event(), out=out)
    thread.join()
    assert (state.status, state.step, state.loss) == ("done", 600, 1.0)
    text = out.getvalue()
    if ui == "plain":
        assert [line.split()[1] for line in text.splitlines() if line.startswith("step ")] == [
            f"{step}/600" for step in range(60, 601, 60)
        ]
    if ui == "json":
        kinds = [json.loads(line)["kind"] for line in text.splitlines()]
        assert len(kinds) == len(recorded) and kinds.count("metrics") == 10
    if ui == "console":
        assert "╭─ done ─" in text and "\x1b" not in text
    if ui == "none":
        assert text == ""


def test_an_earlier_attempt_is_left_out_by_offsets(tmp_path: Path, append, event, metrics) -> None:
    append(tmp_path, event("run_start", 0), metrics(1, 1), event("run_end", 2, 1, status="failed"))
    offsets = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    append(tmp_path, event("run_start", 10, attempt=2), metrics(2, 11), event("run_end", 12, 2, status="done"))
    out = io.StringIO()
    state = follow(tmp_path, ui="plain", offsets=offsets, finished=threading.Event(), out=out)
    assert state.status == "done" and "failed" not in out.getvalue() and "attempt 1" not in out.getvalue()
    # From the start, the end of the first attempt is not the end.
    assert follow(tmp_path, ui="none", finished=threading.Event()).status == "done"


def test_finished_reads_what_is_left_and_ends(tmp_path: Path, append, event, metrics) -> None:
    append(tmp_path, event("run_start", 0), metrics(1, 1))
    finished = threading.Event()
    finished.set()
    out = io.StringIO()
    state = follow(tmp_path, ui="plain", finished=finished, out=out)
    assert state.step == 1 and "ended without reporting a reason" in out.getvalue()
    assert follow(tmp_path / "never", ui="console", finished=finished, out=io.StringIO()).status == "waiting"


def test_the_directory_may_disappear(tmp_path: Path, append, event, metrics) -> None:
    run = tmp_path / "run"
    append(run, event("run_start", 0), metrics(1, 1))

    def disturb() -> None:
        time.sleep(0.15)
        shutil.move(run, tmp_path / "away")
        time.sleep(0.25)
        shutil.move(tmp_path / "away", run)
        append(run, metrics(2, 2), event("run_end", 3, 2, status="done"))

    thread = threading.Thread(target=disturb)
    thread.start()
    out = io.StringIO()
    state = follow(run, ui="plain", finished=threading.Event(), out=out)
    thread.join()
    assert state.status == "done"
    assert out.getvalue().count("\nstep 1 ") == 1 and out.getvalue().count("\nstep 2 ") == 1


def test_following_goes_on_when_the_reader_is_gone(tmp_path: Path, append, recorded) -> None:
    """The process sees the run to its end and exits as if it had been read: no message, no exit code 120."""
    program = (
        "import sys, threading; from pathlib import Path; from xtrain.tui.lines.view import follow\n"
        "state = follow(Path(sys.argv[1]), ui='plain', finished=threading.Event())\n"
        "print(state.status, file=sys.stderr)"
    )
    append(tmp_path, *recorded[:6])
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout and child.stderr
    assert child.stdout.readline().startswith("run  ")
    child.stdout.close()
    append(tmp_path, *recorded[6:])
    assert child.wait(20) == 0
    assert child.stderr.read() == "done\n"


def test_a_closed_stream_is_given_up_quietly() -> None:
    stream = io.StringIO()
    out = Output(stream)
    stream.close()
    assert out.write("x") == 1 and out.closed and not out.isatty()


def test_an_encoding_that_lacks_our_signs(tmp_path: Path, append, recorded) -> None:
    append(tmp_path, *recorded)
    for ui in ("plain", "console"):
        raw = io.BytesIO()
        stream = io.TextIOWrapper(raw, encoding="ascii")
        follow(tmp_path, ui=ui, finished=threading.Event(), out=stream)
        assert b"done" in raw.getvalue() and not stream.closed


def test_the_view_imports_neither_torch_nor_the_runtime() -> None:
    code = (
        "import sys, xtrain.tui.lines.view\n"
        "heavy = ('torch', 'numba', 'textual', 'xtrain.runtime', 'xtrain.server')\n"
        "print([m for m in sys.modules if m.startswith(heavy)])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_choice_of_view(monkeypatch) -> None:
    for name, value in (("TERM", "xterm"), ("CI", "")):
        monkeypatch.setenv(name, value)
    assert choose_ui(None, Terminal()) == "console"
    assert choose_ui(None, io.StringIO()) == "plain"
    assert choose_ui("json", Terminal()) == "json"
    monkeypatch.setenv("CI", "true")
    assert choose_ui(None, Terminal()) == "plain"
    monkeypatch.setenv("CI", "false")
    monkeypatch.setenv("TERM", "dumb")
    assert choose_ui(None, Terminal()) == "plain"
    with pytest.raises(ValueError, match="no view is called 'tui': choose one of plain, console, json, none"):
        choose_ui("tui", Terminal())
