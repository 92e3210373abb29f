"""`early_stop`: when it finishes a run, what a checkpoint keeps of it, and its rules."""

import json
import os
from types import SimpleNamespace
from typing import Any

import pytest
from forking import ForkedCommand

from xtrain.cli.main import main
from xtrain.components.actions.early_stop_torch import stop_early
from xtrain.runtime.base.state import Progress
from xtrain.runtime.nn.batch import Step

NAN = float("nan")
SPEC = """
experiment early { budget = 12 steps }
model qwen3 { dim = 16, layers = 1, heads = 2 }
tokenizer bytes
dataset a { source = text("*.txt"), holdout = 25% }
batch { sequence = 32, rows = 2 }
optimizer adamw { lr = 1e-3 }
launch { device = cpu }
every 2 steps eval a { batches = 1 } then early_stop { metric = eval.a.loss, patience = 2, least = 9 }
every 1 step checkpoint
"""


def own(own: bool) -> Any:
    return SimpleNamespace(start=SimpleNamespace(own=own))


def end_of(values: list[float | None], progress: Progress | None = None, **settings: Any) -> int | None:
    """The step after which the run is over, of values measured after steps 1, 2, …; None for steps without one."""
    progress = progress or Progress()
    call = stop_early(
        "n", progress, own(True), "eval/a/loss", **{"patience": 2, "least": 0.0, "highest": False} | settings
    )
    for value in values:
        progress.step += 1
        if value is not None:
            progress.measured["eval/a/loss"] = (progress.step, value)
        call(Step(index=progress.step - 1))
        if progress.over:
            return progress.step
    return None


@pytest.mark.parametrize(
    ("values", "settings", "step"),
    [
        ([3.0, 2.0, 2.5, 2.1], {}, 4),
        ([3.0, 2.0, 2.0, 1.9, 1.95], {}, None),  # an equal value is no improvement; 1.9 is one
        ([3.0, 2.0, 2.0, 2.0], {}, 4),
        ([3.0, None, 3.5, None, 3.5], {}, 5),  # steps without a measurement do not count
        ([1.0, 2.0, 1.5, 1.9], {"highest": True}, 4),
        ([3.0, 2.5, 2.0], {"least": 0.5, "patience": 1}, 2),  # 0.5 is not more than 0.5
        ([3.0, 2.4, 2.0, 1.8], {"least": 0.5}, None),  # 2.4, then 1.8 are improvements
        ([NAN, NAN], {}, 2),
        ([3.0, NAN, 2.0, NAN], {}, None),
        ([3.0, 4.0], {"patience": 1}, 2),
    ],
)
def test_a_run_is_over_after_patience_measurements_without_improvement(values, settings, step):
    assert end_of(values, **settings) == step


def test_counters_go_through_a_checkpoint():
    first, resumed = Progress(), Progress()
    assert end_of([3.0, 2.0, 2.5], first) is None
    state = json.loads(json.dumps(first.counters()))
    resumed.take(state)
    assert resumed.kept == {"n": {"metric": "eval/a/loss", "best": 2.0, "waited": 1}} and end_of([2.1], resumed) == 4
    # Finished, and started again: over without another step. With more patience it trains on.
    again = Progress()
    again.take(json.loads(json.dumps(resumed.counters())))
    stop_early("n", again, own(True), "eval/a/loss", 3, 0.0, False)
    assert not again.over
    stop_early("n", again, own(True), "eval/a/loss", 2, 0.0, False)
    assert "2 measurements in a row" in again.over
    for own_run, metric in ((False, "eval/a/loss"), (True, "eval/b/loss")):
        other = Progress()
        other.take(resumed.counters())
        stop_early("n", other, own(own_run), metric, 2, 0.0, False)
        assert not other.over and not other.kept


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in range(8):
        (tmp_path / f"{number}.txt").write_text("abcdefgh" * 20)
    (tmp_path / "early.xtrain").write_text(SPEC)
    return tmp_path


def run(folder, *more: str) -> list[dict[str, Any]]:
    """Run the spec; return the events of all starts."""
    command = ForkedCommand(
        ["run", "early.xtrain", "--ui", "none", *more], folder, {**os.environ, "OMP_NUM_THREADS": "1"}
    )
    out, err = command.communicate(timeout=200)
    assert command.wait() in (0, 75), out + err
    return [json.loads(line) for file in folder.glob("runs/*/*/events.jsonl") for line in file.read_text().splitlines()]


def test_a_run_finishes_and_is_not_trained_again(folder):
    run(folder, "--set", "launch.stop_at=5 steps")
    run(folder)  # goes on to step 6, where the second measurement without improvement is
    events = run(folder)
    ends = [event for event in events if event["event"] == "run_end"]
    assert [(end["status"], end["step"]) for end in ends] == [("stopped", 5), ("done", 6), ("complete", 6)]
    reasons = [event["reason"] for event in events if event["event"] == "stop"]
    assert "eval/a/loss has not improved in 2 measurements in a row" in reasons[1] and len(reasons) == 2


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("metric = eval.a.loss", "metric = eval.b.loss", "there is no such dataset"),
        ("metric = eval.a.loss", "metric = eval.a.accuracy", "evaluations of a measure loss"),
        ("eval a { batches = 1 } then ", "", "no tick evaluates it"),
        ("metric = eval.a.loss, ", "", "metric"),
        (
            "every 1 step checkpoint",
            "on finish early_stop { metric = eval.a.loss }",
            "on finish has the action early_stop",
        ),
        ("patience = 2", "patience = 0", "patience"),
    ],
)
def test_wrong_use_is_told_of(folder, capsys, old, new, said):
    (folder / "early.xtrain").write_text(SPEC.replace(old, new))
    assert main(["plan", "early.xtrain"]) == 2
    assert said in "".join(capsys.readouterr())


def test_a_metric_measured_in_other_steps_is_warned_of(folder, capsys):
    apart = "every 5 steps eval a { batches = 1 }\nevery 7 steps early_stop"
    (folder / "early.xtrain").write_text(SPEC.replace("every 2 steps eval a { batches = 1 } then early_stop", apart))
    assert main(["plan", "early.xtrain"]) == 0
    assert "never evaluated in a step in which early_stop is due" in "".join(capsys.readouterr())
