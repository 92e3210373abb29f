"""Metrics of the trials of a sweep: read on as they grow, those that are trained most often."""

import json
import time
from pathlib import Path

from xtrain.records.sweep import SweepState, TrialState
from xtrain.tui.model import metrics as trial_curves
from xtrain.tui.model.metrics import TrialCurves


def sweep(count: int) -> SweepState:
    trials = [TrialState(number=n, name=f"{n:03d}-x", point={}, sameness=str(n)) for n in range(count)]
    return SweepState(trials={each.number: each for each in trials})


def write(folder: Path, name: str, steps: range) -> None:
    (folder / name).mkdir(exist_ok=True)
    with (folder / name / "metrics.jsonl").open("a") as file:
        for step in steps:
            file.write(json.dumps({"step": step, "time": 1.0, "tokens": 10 * step, "loss": 1 / (step + 1)}) + "\n")


def last(curves: TrialCurves, name: str) -> float:
    x, _ = curves.series[name].xy("loss", "tokens")
    return float(x[-1]) if len(x) else -1.0


def test_it_reads_on(tmp_path: Path, monkeypatch):
    state, curves = sweep(3), TrialCurves(tmp_path)
    state.trials[1].going = True
    for name in ("000-x", "001-x"):
        write(tmp_path, name, range(5))
    curves.poll(state, time.monotonic() + 10)
    assert [last(curves, f"{n:03d}-x") for n in range(3)] == [40.0, 40.0, -1.0]
    before = curves.version
    for name in ("000-x", "001-x", "002-x"):
        write(tmp_path, name, range(5, 8))
    curves.poll(state, time.monotonic() + 10)
    assert last(curves, "001-x") == 70.0 and curves.version > before
    assert last(curves, "000-x") == 40.0, "one that is not trained rests"
    monkeypatch.setattr(trial_curves, "REST_SECONDS", 0.0)
    curves.poll(state, time.monotonic() + 10)
    assert [last(curves, f"{n:03d}-x") for n in range(3)] == [70.0] * 3


def test_a_poll_without_time_reads_one_and_then_the_next(tmp_path: Path):
    state, curves = sweep(3), TrialCurves(tmp_path)
    for number in range(3):
        write(tmp_path, f"{number:03d}-x", range(5))
        curves.poll(state, 0.0)
    assert [last(curves, f"{n:03d}-x") for n in range(3)] == [40.0] * 3


def test_trials_that_have_no_run_are_left_out(tmp_path: Path):
    state, curves = sweep(3), TrialCurves(tmp_path)
    state.trials[1].same_as, state.trials[2].reason = 0, "X641: it has no plan"
    curves.poll(state, time.monotonic() + 10)
    assert list(curves.series) == ["000-x"]
