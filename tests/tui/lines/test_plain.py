"""Lines for pipes and log files."""

import io
import json
from pathlib import Path

import pytest
from read_records import typed

from xtrain.records.events import event_of
from xtrain.records.metrics import StepMetrics
from xtrain.text.units import count, decimal, duration, printable, size, took
from xtrain.tui.lines.plain import JsonView, PlainView, event_lines, going_on, step_line
from xtrain.tui.state import RunState, reduce, reduce_all

GOLDEN = """\
run  shakespeare  attempt 1  4 ranks on cpu  600 steps
setup  setup.weights                   12.3 s  initialised from seed 42
ready  13.0 s
step 60/600  loss 3.7000  grad_norm 0.812  lr 3.00e-03  12.3k tok/s  0.85 s/step  eta 7m39s
step 120/600  loss 3.4000  grad_norm 0.812  lr 3.00e-03  12.3k tok/s  0.85 s/step  eta 6m48s
eval  step 120  held[bold]out  loss 2.0000  ppl 7.39  65.5k tokens  1.00 s
sample  step 120  1/1  prompt 'ROMEO:'
    What �[31mlight� 猫
    is this?
checkpoint  step 120  checkpoints/step-120  143.1 MiB  0.41 s
warning  step 120  the loader is slow
    raise data.workers
step 180/600  loss 3.1000  grad_norm 0.812  lr 3.00e-03  12.3k tok/s  0.85 s/step  eta 5m57s
nonfinite  step 180  loss nan  grad_norm inf
skipped  step 180  the gradient was not finite
"""
GOLDEN_END = """\
step 600/600  loss 1.0000  grad_norm 0.812  lr 3.00e-03  12.3k tok/s  0.85 s/step  eta 0s
end  done  step 600  loss 1.0000  8m50s
final  held[bold]out  loss 2.0000  ppl 7.39  (step 120)
directory  runs/x
next  xtrain generate runs/x --prompt "…"
"""
GOLDEN_FAILED = """\
failure  step 180  rank 2  RuntimeError: boom
    Traceback:
      line
    RuntimeError: boom
end  failed  step 180  2m52s
final  held[bold]out  loss 2.0000  ppl 7.39  (step 120)
directory  runs/x
logs  runs/x/logs
next  run the same command again to resume from step 120
"""


GOLDEN_DATA = """\
tokenise  web  tokenizing: 12%, 1.2 GB of 10 GB
phase  step 60  drill  sums 60.0%, code 30.0%, noise 10.0%
phase  step 90  last  code 100.0%  lr × 0.5
"""


def plain(records, *, close: bool = True, verbose: bool = False) -> str:
    out = io.StringIO()
    view = PlainView(out, Path("runs/x"), verbose=verbose)
    state = RunState()
    for record in map(typed, records):
        state = reduce(state, record)
        view.draw(state, record)
    if close:
        view.close(state)
    return out.getvalue()


def test_golden(recorded) -> None:
    text = plain(recorded)
    assert text.startswith(GOLDEN)
    assert text.endswith(GOLDEN_END)


def test_golden_failure(failed) -> None:
    assert plain(failed).endswith(GOLDEN_FAILED)


def test_a_step_without_an_end_or_with_little_to_say() -> None:
    assert step_line(RunState(), StepMetrics(step=3, loss=float("nan"))) == "step 3  loss nan"
    minimised = StepMetrics(step=3, loss=1.0, objective=1.5)
    assert step_line(RunState(), minimised) == "step 3  loss 1.0000  objective 1.5000"


@pytest.mark.parametrize(
    ("status", "last"),
    [("stopped", "next  run the same command again to resume from step 40"),
        ("interrupted", "next  run the same command again to resume from step 40"),
        ("complete", 'next  xtrain generate runs/x --prompt "…"')],
)  # fmt: skip
def test_other_ends(event, status: str, last: str) -> None:
    saved = event("checkpoint", 1, 40, path="p")
    assert plain([saved, event("run_end", 2, 41, status=status)]).splitlines()[-1] == last


def test_without_a_checkpoint_there_is_nothing_to_generate_with(event) -> None:
    assert plain([event("run_end", 1, 41, status="done")]).splitlines()[-1].startswith("next  no checkpoint was saved")


def test_what_was_exported_or_saved_alone_is_there(event) -> None:
    """Up to the step that the run has gone back to."""
    end = event("run_end", 9, 41, status="done")
    exported = event("export", 1, 40, node="tick.export", path="out/a", weights="trained", formats={"fp32": 4})
    assert plain([exported, end]).splitlines()[-1] == "next  what was trained is in out/a"
    saved = event("model", 2, 41, node="tick.model", path="p", weights="trained")
    assert plain([exported, saved, end]).splitlines()[-1] == 'next  xtrain generate runs/x --prompt "…"'
    back = event("rollback", 3, 40, checkpoint="p")
    assert plain([exported, saved, back, end]).splitlines()[-1] == "next  what was trained is in out/a"
    anew = event("run_start", 3, 0, attempt=2)
    assert plain([exported, saved, anew, end]).splitlines()[-1].startswith("next  no checkpoint was saved")


def test_an_end_without_a_word(metrics) -> None:
    assert "end  training  step 7  the run ended without reporting a reason\n" in plain([metrics(7, 1)])
    assert plain([]).startswith("end  waiting  step 0  nothing was recorded\n")


def test_an_event_of_a_later_version(event) -> None:
    assert plain([event("moved", 1, 5, to="node 7", ranks=[1])], close=False) == "moved  step 5  to node 7  ranks [1]\n"


def test_foreign_text_cannot_start_a_line_of_its_own(event) -> None:
    assert plain([event("eval", 1, 5, dataset="a\nend  done", loss=1.0)], close=False).count("\n") == 1


def test_json_is_strict_and_says_what_each_line_is(event, metrics) -> None:
    out = io.StringIO()
    view = JsonView(out)
    for record in (metrics(1, 1, loss=float("nan"), kind="own"), event("eval", 2, 1, dataset="猫")):
        view.draw(RunState(), typed(record))
    first, second = (json.loads(line, parse_constant=pytest.fail) for line in out.getvalue().splitlines())
    assert first["kind"] == "metrics" and first["loss"] == "nan" and first["step"] == 1
    assert second.items() >= {"kind": "event", **event("eval", 2, 1, dataset="猫")}.items()


def test_words() -> None:
    assert [count(n) for n in (0, 950, 999.96, 12_345, 999_960, 3.4e9, 5.6e12, float("nan"))] == [
        "0", "950", "1.0k", "12.3k", "1.0M", "3.4B", "5.6T", "–",
    ]  # fmt: skip
    assert [duration(s) for s in (0.4, 59.6, 408, 3900, 183_600, None)] == [
        "0s",
        "1m00s",
        "6m48s",
        "1h05m",
        "2d03h",
        "–",
    ]
    assert [took(s) for s in (0.311, 9.996, 12.34, 125)] == ["0.31 s", "10.0 s", "12.3 s", "2m05s"]
    assert [size(n) for n in (512, 1023.99 * 1024, 1.5 * 2**30)] == ["512 B", "1.0 MiB", "1.5 GiB"]
    assert [decimal(x, 4) for x in (2.34567, 0.0, 1e-6, 1e9, float("inf"), None)] == [
        "2.3457", "0.0000", "1.00e-06", "1.00e+09", "inf", "–",
    ]  # fmt: skip
    assert printable("a\x1b[2J\r\nb\tc\x85\u202e\ud800") == "a�[2J\nb   c���"


def test_phases_and_long_builds() -> None:
    shares = {"code": 0.3, "sums": 0.6, "noise": 0.1}
    records = [
        {"event": "tokenise", "step": 0, "dataset": "web", "message": "tokenizing: 12%, 1.2 GB of 10 GB", "done": 1},
        {"event": "phase", "step": 60, "name": "drill", "shares": shares, "lr_scale": 1.0},
        {"event": "phase", "step": 90, "name": "last", "shares": {"code": 1.0}, "lr_scale": 0.5},
    ]
    assert plain(records, close=False) == GOLDEN_DATA


@pytest.mark.parametrize(
    ("groups", "said"),
    [({"model": "read", "ema": "begun", "rng": "anew"}, "  ema begun, rng anew"), ({"model": "read", "rng": "own"}, ""),
        (None, "")],
)  # fmt: skip
def test_a_run_that_goes_on_says_what_does_not_go_on_as_before(event, groups, said) -> None:
    record = event("resumed", 1, 40, path="checkpoints/ckpt", source="run", groups=groups)
    assert plain([record], close=False) == f"resumed  step 40  checkpoints/ckpt{said}\n"


def test_an_evaluation_says_whether_it_is_of_averaged_weights(event) -> None:
    for weights, said in (("averaged", "  averaged weights"), ("trained", "")):
        record = event("eval", 1, 5, dataset="web", loss=0.0, tokens=None, seconds=1.0, weights=weights)
        assert plain([record], close=False) == f"eval  step 5  web  loss 0.0000  ppl 1.00{said}  1.00 s\n"


def test_a_restart_says_what_has_happened_and_where_it_goes_on(event) -> None:
    record = event("restart", 9, step=4, number=1, of=3, reason="rank 1 was killed by SIGKILL", world=2)
    (line,) = event_lines(event_of(record))
    assert line == "restart  step 4  1 of 3  rank 1 was killed by SIGKILL; continues from step 4 on 2 ranks"
    (line,) = event_lines(event_of(event("restart", 9, step=0, reason="rank 0 exited with code 1")))
    assert line == "restart  step 0  rank 0 exited with code 1; continues from the beginning"


def test_a_model_that_gives_rewards_is_exported_and_not_asked_to_write(event) -> None:
    start = event("run_start", 0, 0, name="r", world_size=1, device="cpu", attempt=1, directory="d", rewards=True)
    saved = event("checkpoint", 1, 40, path="p")
    said = plain([start, saved, event("run_end", 2, 41, status="complete")])
    assert said.splitlines()[-1] == "next  xtrain export runs/x --to FOLDER"


@pytest.mark.parametrize(
    ("steepest", "said"), [(3.2e-3, "train with --set optimizer.lr=0.0032"), (None, "the loss falls at no rate")]
)
def test_behind_a_search_for_a_rate_stands_the_rate(steepest, said):
    sweep = {"event": "lr_sweep", "step": 40, "points": 40, "steepest": steepest, "minimum_tenth": None}
    ended = {"event": "run_end", "step": 40, "status": "stopped", "loss": 4.0}
    assert going_on(reduce_all(RunState(), [event_of(sweep), event_of(ended)])) == said
