"""How long a run will take is told once, of steps that were measured, without the first one."""

import pytest
from projects import Project, events

from xtrain.planner.load import plan_from_spec
from xtrain.records.training_events import EstimateEvent
from xtrain.runtime.loop import training_loop as module
from xtrain.runtime.loop.executor import Executor
from xtrain.runtime.loop.training_loop import TimeLeft
from xtrain.runtime.nn.batch import Step


def estimates(*seconds: float, last: int = 100, rows: int = 8, later: int = 8) -> list[EstimateEvent | None]:
    """rows, later: of each step that is measured, and of those behind it."""
    left = TimeLeft()
    return [
        left.after(Step(index=n, warms_up=n == 0, rows=rows), each, last, later * (last - n - 1))
        for n, each in enumerate(seconds)
    ]


def test_it_is_estimated_as_soon_as_enough_has_been_measured():
    *before, estimate = estimates(9.0, 0.5, 1.5, 1.0)
    assert before == [None, None, None]
    assert estimate is not None
    assert estimate == EstimateEvent(
        step=4, time=estimate.time, step_seconds=1.0, measured_steps=3, first_step_seconds=9.0, steps_left=96,
        seconds_left=96.0,
    )  # fmt: skip


def test_steps_with_more_rows_take_longer():
    *_, estimate = estimates(9.0, 0.5, 1.5, 1.0, rows=8, later=32)
    assert estimate is not None and (estimate.step_seconds, estimate.seconds_left) == (1.0, 4 * 96.0)


@pytest.mark.parametrize(
    ("seconds", "last"), [((9.0,), 100), ((9.0, 60.0), 100), ((9.0, 1.0, 1.9), 100), ((9.0, 4.0, 4.0), 3)]
)
def test_nothing_is_estimated_from_one_step_from_too_short_a_time_or_at_the_end(seconds, last):
    assert estimates(*seconds, last=last) == [None] * len(seconds)


def test_every_start_says_it_once_for_its_own_steps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "LEAST_SECONDS", 0.0)
    spec = tmp_path / Project(tmp_path).spec(steps=12)
    for sets in (("launch.stop_at=7 steps",), ()):
        plan = plan_from_spec(spec, sets).plan
        assert plan is not None and "estimate the run's duration" in plan.node("setup.observe").does
        Executor(plan, tmp_path / "run", rank=0).run()
    first, second = events(tmp_path / "run", "estimate")
    assert (first["step"], first["measured_steps"], first["steps_left"]) == (3, 2, 4)
    assert (second["step"], second["measured_steps"], second["steps_left"]) == (10, 2, 2)
    for each in (first, second):
        assert each["seconds_left"] == pytest.approx(each["steps_left"] * each["step_seconds"])
        assert each["first_step_seconds"] > 0
