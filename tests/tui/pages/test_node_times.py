"""Times of nodes: figures are those of ranks and events."""

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_boards import a_board, a_rank, entries, small_plan, some_ranks, started

from xtrain.records.metrics import StepMetrics
from xtrain.tui.model.life import Ranks
from xtrain.tui.model.planned import PlannedTick
from xtrain.tui.pages.node_times import (
    StepTimes,
    due,
    last_times,
    period,
    setup_times,
    step_cost,
    step_times,
    under_way,
)

SECONDS = st.floats(0, 1e3, allow_nan=False)


@given(st.lists(st.dictionaries(st.sampled_from(["a", "b", "c"]), SECONDS, min_size=1), min_size=1, max_size=9))
def test_of_each_node_the_slowest_rank_and_the_median_are_shown(by_rank: list[dict[str, float]]) -> None:
    found = step_times(enumerate(by_rank))
    for node, time in found.items():
        own = {rank: nodes[node] for rank, nodes in enumerate(by_rank) if node in nodes}
        assert time.slowest == max(own.values()) == own[time.slowest_rank]
        assert time.median == median(own.values())
        assert time.ranks == len(own)
    shares = sum(time.share for time in found.values())
    assert shares == pytest.approx(1.0) or shares == 0.0


def test_of_equally_slow_ranks_the_first_is_named() -> None:
    assert step_times([(3, {"a": 1.0}), (4, {"a": 1.0})])["a"].slowest_rank == 3


def test_numbers_that_are_none_do_not_count() -> None:
    assert step_times([(0, {"a": float("nan"), "b": float("inf")}), (1, {"a": -1.0})]) == {}


def test_times_are_made_again_only_when_a_rank_has_reported_new_ones() -> None:
    plan, times = small_plan(), StepTimes()
    ranks = some_ranks(plan)
    first = times.of(ranks)
    assert times.of(Ranks(world_size=2, all=ranks.all)) is first
    slower = a_rank(1, plan, node_seconds={"step.fetch": 9.0})
    again = times.of(Ranks(world_size=2, all=(ranks[0], slower)))
    assert again["step.fetch"].slowest == 9.0 and again["step.fetch"].slowest_rank == 1


def test_set_up_nodes_that_have_begun() -> None:
    records = [
        started(),
        {"event": "setup_begin", "node": "setup.bootstrap", "time": 1.0, "step": 0},
        {"event": "setup", "node": "setup.bootstrap", "time": 2.0, "step": 0, "seconds": 0.75, "detail": ""},
        {"event": "setup_begin", "node": "setup.loader", "time": 3.0, "step": 0},
    ]
    found = setup_times(a_board(records=records).run)
    assert (found["setup.bootstrap"].seconds, found["setup.loader"].seconds) == (0.75, None)
    assert found["setup.loader"].began == 3.0


def test_the_latest_time_of_a_tick_counts() -> None:
    log = entries(
        {"event": "eval", "node": "tick.eval.web", "seconds": 1.0, "step": 20},
        {"event": "eval", "node": "tick.eval.web", "seconds": 2.0, "step": 40},
        {"event": "health", "node": "tick.health", "seconds": 64.0, "step": 40},
        {"event": "warning", "message": "no node", "step": 40},
        {"event": "setup", "node": "setup.loader", "seconds": 3.0, "step": 0},
        {"event": "checkpoint", "node": "tick.checkpoint", "seconds": None, "step": 40},
    )
    found = last_times(log.entries)
    assert {node: (took.seconds, took.step) for node, took in found.items()} == {"tick.eval.web": (2.0, 40)}


def tick(**when: float) -> PlannedTick:
    values = {"steps": None, "tokens": None, "seconds": None} | when
    return PlannedTick(nodes=("tick.log",), count=None, stop=False, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("when", "ended", "step"),
    [
        ({"steps": 40}, 0, 40), ({"steps": 40}, 39, 40), ({"steps": 40}, 40, 80), ({"steps": 40}, 80, None),
        ({"steps": 1}, 99, 100), ({"steps": 1}, 100, None),
        ({"tokens": 2500}, 0, 3), ({"tokens": 2500}, 2, 3), ({"tokens": 2500}, 3, 5), ({"tokens": 500}, 3, 4),
        ({"tokens": 2000}, 2, 4),
    ],
)  # fmt: skip
def test_a_tick_is_due_where_the_run_does_it(when: dict[str, float], ended: int, step: int | None) -> None:
    found = due(tick(**when), small_plan(), step=ended, pace=2.0)
    assert found.step == step and found.over == (step is None)
    assert found.seconds == (None if step is None else (step - ended) * 2.0)
    if step is not None:  # as runtime/loop/node_calls.py decides it, after every step
        steps, tokens = when.get("steps"), when.get("tokens")
        first = next(
            at for at in range(ended + 1, 200)
            if (steps and at % steps == 0) or (tokens and at * 1000 // tokens > (at - 1) * 1000 // tokens)
        )  # fmt: skip
        assert first == step


def test_of_a_clock_only_its_period_is_known() -> None:
    found = due(tick(seconds=600.0), small_plan(), step=3, pace=1.0)
    assert (found.every, found.step, found.over) == ("10 min", None, False)


@pytest.mark.parametrize(
    ("seconds", "words"), [(600.0, "10 min"), (90.0, "90 s"), (7200.0, "2 h"), (0.5, "0.5 s"), (None, "–")]
)
def test_periods(seconds: float | None, words: str) -> None:
    assert period(seconds) == words


def test_a_step_against_its_plan() -> None:
    times = {"computing": 1.0, "exposed": 0.5, "step": 2.0, "fast": 1.5, "slow": 2.5, "mfu": 0.4}
    plan = small_plan(estimates={"tokens_per_step": 1000, "classes": [], "times": times})
    cost = step_cost(StepMetrics(step=1, step_seconds=3.0, data_seconds=0.3, comm_seconds=0.6), plan)
    assert cost.over == pytest.approx(0.5)
    assert cost.share(cost.data) == pytest.approx(0.1)
    planned = cost.planned
    assert (planned.step, planned.fast, planned.slow, planned.computing, planned.exposed) == (2.0, 1.5, 2.5, 1.0, 0.5)
    unknown = step_cost(StepMetrics(step=None), None)
    assert (unknown.over, unknown.share(1.0), unknown.actual) == (None, None, None)


def test_the_nodes_that_ranks_are_in() -> None:
    plan = small_plan({"fsdp": 4})
    from made_boards import a_beat

    ranks = some_ranks(plan, pulse={3: "gone"}, beat={1: a_beat(1, node="step.fetch"), 2: None})
    assert under_way(ranks) == {"step.forward_backward": (0,), "step.fetch": (1,)}
