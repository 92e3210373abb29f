"""When ticks come next, where a run stops, and how long that takes."""

from typing import Any

import pytest
from attrs import evolve
from made_boards import a_board, small_plan, started
from msgspec.structs import replace

from xtrain.tui.board.head import head, upcoming
from xtrain.tui.model.board import Board, last_step, next_step, num_times, seconds_left
from xtrain.tui.model.life import Ranks
from xtrain.tui.model.planned import PlannedTick, StepTokens

PLAN = small_plan()  # 100 steps: every 40 an evaluation and a checkpoint, every 600 s a checkpoint


def tick(**fields: Any) -> PlannedTick:
    values = {"steps": None, "tokens": None, "seconds": None, "count": None, "stop": False, "nodes": ("tick.log",)}
    return PlannedTick(**values | fields)


def board(*more: dict[str, Any], until: int = 30, seconds: float = 1.0, **plan: Any) -> Board:
    """After a record a step."""
    steps = [{"step": step, "time": seconds * step, "loss": 1.0, "tokens": 1} for step in range(1, until + 1)]
    found = a_board(evolve(PLAN, **plan), records=[started(), *steps, *more])
    return evolve(found, ranks=Ranks())


def took(node: str, seconds: float, event: str = "eval", **fields: Any) -> dict[str, Any]:
    return {"event": event, "time": 30.0, "step": 30, "node": node, "seconds": seconds, **fields}


@pytest.mark.parametrize("when", [{"steps": 1}, {"steps": 7}, {"tokens": 2500}, {"tokens": 300}, {"tokens": 1000}])
def test_as_often_as_it_comes_one_after_the_other(when: dict[str, int]) -> None:
    each, step, found = tick(**when), 5, 0
    while (step := next_step(each, StepTokens.alike(1000), step) or 0) <= 60:
        found += 1
    assert num_times(each, StepTokens.alike(1000), 5, 60) == found


def test_what_comes_between_steps_takes_its_time() -> None:
    assert seconds_left(board()) == pytest.approx(70)
    evaluated = board(took("tick.eval.web", 20.0))
    assert seconds_left(evaluated) == pytest.approx(70 + 2 * 20)
    saved = took("tick.checkpoint", 30.0, "checkpoint", blocked_seconds=0.5)
    assert seconds_left(board(took("tick.eval.web", 20.0), saved)) == pytest.approx(70 + 2 * 20.5)


def test_a_clock_comes_as_often_as_the_steps_take() -> None:
    saved = took("tick.checkpoint", 9.0, "checkpoint")
    assert seconds_left(board(saved, seconds=20.0)) == pytest.approx(70 * 20 + (2 + 2) * 9)


def test_what_every_record_holds_is_in_its_pace() -> None:
    ticks = (tick(steps=1, nodes=("tick.eval.web",)),)
    assert seconds_left(board(took("tick.eval.web", 0.5), ticks=ticks)) == pytest.approx(70)


@pytest.mark.parametrize(
    ("plan", "last"),
    [({}, 100), ({"stop_at": 50}, 50), ({"stop_after": 40}, 40), ({"stop_at": 20}, 30), ({"stop_at": 200}, 100),
     ({"ticks": (tick(steps=45, stop=True),)}, 45), ({"steps": None, "stop_at": 60}, 60)],
)  # fmt: skip
def test_a_run_may_stop_before_its_end(plan: dict[str, Any], last: int) -> None:
    stopping = board(**plan)
    if plan.get("steps", 100) is None:
        stopping = evolve(stopping, run=evolve(stopping.run, start=replace(stopping.run.start, steps=None)))
    assert last_step(stopping) == last and seconds_left(stopping) == pytest.approx(last - 30)


def test_a_start_trains_its_own_steps_whatever_fell_meanwhile() -> None:
    again = [{"event": "restart", "time": 31.0, "step": 30}, started(resumed_step=20, attempt=2, time=32.0)]
    assert last_step(board(*again, stop_after=40)) == 40
    assert last_step(board(started(resumed_step=20, attempt=2, time=32.0), stop_after=40)) == 60


def test_the_head_says_that_it_is_about_and_until_when() -> None:
    assert "ETA ~1m10s" in head(board(), 120).plain
    assert "stops at 50 in ~20s" in head(board(stop_at=50), 120).plain
    assert upcoming(board(stop_at=50))[-2].what == "the stop" and upcoming(board(stop_at=50))[-2].in_steps == 20
