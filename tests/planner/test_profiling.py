"""Profiles and memory snapshots in a plan: who is looked at, when, and what is refused."""

from itertools import pairwise
from math import ceil, floor

import pytest
from examples import drawn
from hypothesis import given
from hypothesis import strategies as st

from xtrain.dsl.schema.setting import AUTO
from xtrain.plan.graph import recorded_ranks
from xtrain.planner.review.page import render
from xtrain.planner.rules.schedule import ProfiledSteps, meetings

CUDA = "launch { device = cuda }"


@pytest.fixture
def said(compiled):
    """What is said of a spec, errors and warnings."""
    return lambda **blocks: list(compiled(**blocks).diagnostics)


@given(st.integers(1, 64), st.integers(0, 8).map(lambda n: 2**n), st.integers(1, 300))
def test_ranks_are_spread_evenly_and_every_pipeline_coordinate_has_one(pipeline, more, number):
    world = pipeline * more
    chosen = recorded_ranks(AUTO, world, pipeline)
    if chosen is None:
        assert world <= max(8, pipeline)
    else:
        assert len(set(chosen)) == len(chosen) == max(8, pipeline)
        assert {rank // more for rank in chosen} == set(range(pipeline)) if pipeline >= 8 else chosen[0] == 0
    few = recorded_ranks(number, world, pipeline)
    assert (few is None) == (number >= world)
    assert few is None or (few[0] == 0 and len(set(few)) == number and max(few) < world)
    assert recorded_ranks("all", world, pipeline) is None
    assert recorded_ranks("first", world, pipeline) == ([0] if world > 1 else None)


def test_of_a_few_pipeline_coordinates_each_has_one_too():
    for pipeline in (2, 3, 4, 5, 6, 7):
        chosen = recorded_ranks(AUTO, 100 * pipeline, pipeline)
        assert chosen is not None and {rank // 100 for rank in chosen} == set(range(pipeline))


def test_arguments_and_words_of_a_profile(make_plan):
    plan = make_plan(more="every 50 steps profile\nevery 10 steps memory_snapshot")
    assert plan.node("tick.profile").args == {
        "wait": 1, "warmup": 1, "active": 3, "ranks": None, "shapes": False, "stacks": False, "memory": False
    }  # fmt: skip
    assert "3 steps, after 1 skipped and 1 for warm-up," in plan.node("tick.profile").does
    plan = make_plan(more="every 50 steps profile { wait = 0, warmup = 0, active = 1, stacks = true, shapes = true }")
    assert plan.node("tick.profile").does.startswith("profile 1 step on ")
    assert ", with shapes and stacks: a trace and a summary of each" in plan.node("tick.profile").does
    page = render(make_plan(more="every 50 steps profile then memory_snapshot"))
    assert any(line.split()[3:6] == ["profile", "then", "memory_snapshot"] for line in page.splitlines())


def test_a_command_records_as_the_spec_declares_it(make_plan):
    assert make_plan().node("event.control.profile").args == {
        "warmup": 1, "ranks": None, "shapes": False, "stacks": False, "memory": False
    }  # fmt: skip
    args = (
        make_plan(more="every 50 steps profile { wait = 3, warmup = 2, memory = true }")
        .node("event.control.profile")
        .args
    )
    assert (args["warmup"], args["memory"]) == (2, True) and "wait" not in args and "active" not in args


def test_thousands_of_ranks_are_not_all_recorded(make_plan):
    plan = make_plan(
        parallel="parallel { fsdp 64 }", batch="batch { sequence = 64, micro = 1 }", more="every 50 steps profile"
    )
    assert plan.node("tick.profile").args["ranks"] == list(range(0, 64, 8))
    assert "on 8 of 64 ranks" in plan.node("tick.profile").does
    assert plan.node("event.control.profile").args["ranks"] == list(range(0, 64, 8))


@pytest.mark.parametrize(("device", "written", "history"), [
    ("cpu", "memory_snapshot", 0),
    ("cuda", "memory_snapshot", 1),
    ("auto", "memory_snapshot", 1),
    ("cuda", "memory_snapshot { history = 4 }", 4),
    ("cuda", "memory_snapshot { history = 0 }", 0),
])  # fmt: skip
def test_how_long_an_allocator_is_watched(make_plan, device, written, history):
    plan = make_plan(
        launch=f"launch {{ device = {device} }}", more=f"every 50 steps {written}\non finish memory_snapshot"
    )
    assert plan.node("tick.memory_snapshot").args["history"] == history
    assert plan.node("event.finish.memory_snapshot").args["history"] == 0, "there is no step behind it"
    assert ("of recorded GPU allocations" in plan.node("tick.memory_snapshot").does) == bool(history)


@pytest.mark.parametrize(("written", "code", "part"), [
    ("on finish profile", "X614", "on finish has a profile of the next steps"),
    ("on sigterm profile then checkpoint then stop", "X614", "on sigterm has a profile"),
    ("every 50 steps profile then stop", "X614", "a tick has a profile"),
    (f"{CUDA}\non finish memory_snapshot {{ history = 2 }}", "X614", "on finish has a history"),
    ("every 4 steps profile", "X615", "it takes 5 steps, and the next one is due after 4"),
    ("every 2% profile { active = 10 }", "X615", "it takes 12 steps"),
    (f"{CUDA}\nevery 2 steps memory_snapshot {{ history = 3 }}", "X615", "it takes 3 steps"),
    ("every 20 steps profile\nevery 30 steps profile { active = 1 }", "X615", "after step 60 for the first time"),
    ("every 20 steps profile\nevery 13 steps profile", "X615", "after step 40 for the first time"),
    ("every 20 steps profile then profile { active = 1 }", "X615", "after step 20 for the first time"),
    ("on nan(3) profile", "X612", "on nan"),
])  # fmt: skip
def test_what_is_refused(said, written, code, part):
    found = said(more=written)
    messages = [(each.code, each.message) for each in found]
    assert any(each == code and part in message for each, message in messages), messages


@pytest.mark.parametrize(
    "written",
    ["every 5 steps profile", "every 20 steps profile\nevery 1 h profile",
        "every 70 steps profile\nevery 69 steps memory_snapshot", "on finish memory_snapshot",
        "on loss_spike profile then memory_snapshot",
        f"{CUDA}\nevery 50 steps profile then memory_snapshot {{ history = 20 }}"],
)  # fmt: skip
def test_what_is_not(make_plan, written):
    assert make_plan(more=written).timeline.ticks


def test_a_history_that_nobody_writes_is_reported(said):
    found = said(launch="launch { device = cpu }", more="every 50 steps memory_snapshot { history = 2 }")
    assert [each.code for each in found] == ["W401"] and "only a GPU's allocator" in found[0].message
    for quiet in ("memory_snapshot", "memory_snapshot { history = 0 }", "memory_snapshot { history = auto }"):
        assert not said(launch="launch { device = cpu }", more=f"every 50 steps {quiet}")


PERIODS = st.fractions(1, 12, max_denominator=5)
SPANS = st.tuples(PERIODS, st.integers(1, 12)).map(lambda p: (p[0], min(floor(p[0]), p[1])))


@drawn(50, 3000)
@given(st.lists(SPANS, min_size=2, max_size=5), st.none() | st.integers(1, 200))
def test_those_that_meet_are_found_where_they_meet_first(drawn_spans, steps):
    """Against going through the run step by step."""
    spans = [ProfiledSteps("", "", "profile", *span) for span in drawn_spans[: 2 if steps is None else 5]]
    left, running, until, met = [*range(len(spans))], 0, 0, []
    for step in range(1, (4000 if steps is None else steps) + 1):
        due = [number for number, span in enumerate(spans) if step // span.period > (step - 1) // span.period]
        for number in (number for number in due if number in left):
            if step < until and running != number:
                met.append((spans[max(running, number)], spans[min(running, number)], step))
                left.remove(max(running, number))
            if number in left:
                running, until = number, step + spans[number].length
    assert list(meetings(spans, steps)) == met


@drawn(50, 3000)
@given(PERIODS, st.integers(1, 13))
def test_one_that_begins_too_early_again_is_found_where_it_first_does(period, length):
    """Against all its starts, up to where they repeat."""
    span = ProfiledSteps("", "", "profile", period, length)
    starts = [ceil(number * period) for number in range(1, 8)]
    short = [pair for pair in pairwise(starts) if pair[1] - pair[0] < length]
    assert span.first_overlap() == (short[0] if short else None)


def test_periods_in_tokens_are_not_rounded(said, make_plan):
    assert make_plan().estimates.tokens_per_step == 1024

    def refused(*periods, active=1):
        ticks = [f"every {each} profile {{ wait = 0, active = {active} }}" for each in periods]
        return [each.message.partition(": ")[2] for each in said(more="\n".join(ticks)) if each.code == "X615"]

    # Of 9.5 steps: after 10, 19, 29, 38, 48, 57 and 67.
    (meets,) = refused("9728 tokens", "33 steps")
    assert meets.endswith("after step 67 for the first time")
    assert refused("2560 tokens", active=2) == ["it takes 3 steps, and the next one is due after 2"]
    assert refused("3071 tokens", active=2) == []  # the first that comes a step earlier would be the 1024th
