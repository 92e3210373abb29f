"""Ramps of the rows of a step: the plan's arithmetic, what the plan says of them, and wrong ones."""

from fractions import Fraction
from itertools import pairwise

import pytest
from attrs import evolve
from examples import drawn
from hypothesis import given
from hypothesis import strategies as st

from xtrain.dsl.diagnostics.diagnostic import Diagnostics
from xtrain.dsl.load import load_spec
from xtrain.plan.arithmetic import arithmetic_of
from xtrain.plan.serialise import from_json, to_json
from xtrain.plan.step_sizes import StepSizes
from xtrain.planner.compile import compile_plan
from xtrain.planner.review.page import render
from xtrain.planner.review.resumable import resumable

from .conftest import spec_text

RAMP = "batch { sequence = 256, rows = 32, ramp_from = 8, ramp = 6 steps }"


@pytest.fixture
def diagnostics(tmp_path):
    """What is said of a spec with some blocks replaced."""

    def build(**blocks: str) -> Diagnostics:
        (tmp_path / "tiny.xtrain").write_text(spec_text(**blocks))
        loaded = load_spec(tmp_path / "tiny.xtrain")
        return compile_plan(loaded.spec).diagnostics if loaded.spec is not None else loaded.diagnostics

    return build


@drawn(60, 1000)
@given(first=st.integers(1, 40), grows=st.integers(1, 60), ramp=st.integers(1, 50), size=st.fractions(0, 120))
def test_sizes_are_closed_forms_of_the_step(first: int, grows: int, ramp: int, size: Fraction):
    sizes = StepSizes(first + grows, first, ramp)
    each = [sizes.at(step) for step in range(ramp + 20)]
    assert each[0] == first and each == sorted(each) and set(each[ramp:]) == {first + grows}
    assert all(one % sizes.grows_by == 0 for one in each) and (first + grows) % sizes.grows_by == 0
    for step, one in enumerate(each[:ramp]):  # never a whole multiple away from the straight line
        assert 0 <= first + Fraction(step * grows, ramp) - one < sizes.grows_by
    assert [sizes.before(step) for step in range(len(each))] == [sum(each[:step]) for step in range(len(each))]
    of_each = (begin for begin, one in enumerate(each) if begin == 0 or each[begin - 1] != one)
    assert sizes.stretches() == tuple((begin, each[begin]) for begin in of_each)
    assert sizes.reached(size) == next((step for step, one in enumerate(each) if one >= size), None)
    amount = sizes.before(min(ramp, 7)) + first // 2
    steps = sizes.steps_of(amount)
    assert sizes.before(steps) >= amount > (sizes.before(steps - 1) if steps else -1)


def test_the_plan_has_the_ramp_as_arguments_and_as_stretches(make_plan):
    plan = make_plan(batch=RAMP)
    loader = plan.node("setup.loader")
    assert loader.args["ramp"] == {"rows": 8, "steps": 6}
    assert (loader.args["rows"], loader.args["accumulate"]) == (32, 32)
    assert "8 in the first step, growing evenly by 8 rows over 6 steps" in loader.does
    assert [(each.first, each.rows, each.tokens) for each in plan.timeline.stretches] == [
        (0, 8, 2048), (2, 16, 4096), (4, 24, 6144), (6, 32, 8192),
    ]  # fmt: skip
    before = [each.tokens_before for each in plan.timeline.stretches]
    assert before == [0, 2 * 2048, 2 * (2048 + 4096), 2 * (2048 + 4096 + 6144)]
    assert plan.timeline.tokens == before[-1] + (plan.timeline.steps - 6) * 8192
    assert from_json(to_json(plan)) == plan
    assert "ramp 6 steps from 8 rows by 8, 8 to 32 microbatches of the same shape; 24.6k tokens" in " ".join(
        render(plan).split()
    )


def test_without_a_ramp_nothing_is_said_of_one(make_plan):
    plan = make_plan()
    assert "ramp" not in plan.node("setup.loader").args and "stretches" not in to_json(plan)["timeline"]


@pytest.mark.parametrize(("sequence", "tokens"), [(256, 10_000_000), (128, 99_999)])
def test_a_share_of_a_budget_in_tokens_is_one_of_its_steps(make_plan, sequence, tokens):
    plan = make_plan(
        experiment=f"experiment tiny {{ budget = {tokens} tokens }}",
        batch=f"batch {{ sequence = {sequence}, rows = 32, ramp_from = 4, ramp = 25% }}",
    )
    sizes, steps = arithmetic_of(plan).sizes, plan.timeline.steps
    assert sizes.before(steps) >= tokens > sizes.before(steps - 1)
    assert abs(sizes.ramp - steps / 4) <= 1


def test_a_ramp_in_tokens_ends_where_these_are_taken(make_plan):
    plan = make_plan(batch="batch { sequence = 256, rows = 32, ramp_from = 8, ramp = 50_000 tokens }")
    batch = arithmetic_of(plan)
    shorter = evolve(batch, ramp=batch.ramp - 1)
    assert batch.sizes.before(batch.ramp) >= 50_000 > shorter.sizes.before(shorter.ramp)


def test_ticks_in_tokens_and_their_counts_follow_the_ramp(make_plan):
    plan = make_plan(batch=RAMP, every="every 10_000 tokens eval code")
    tick = next(tick for tick in plan.timeline.ticks if tick.nodes == ("tick.eval.code",))
    sizes, steps = arithmetic_of(plan).sizes, plan.timeline.steps
    taken = [sizes.before(step) // 10_000 for step in range(steps + 1)]
    assert tick.count == sum(one < other for one, other in pairwise(taken))


def test_compute_and_time_of_the_run_count_the_steps_of_a_ramp_by_their_tokens(make_plan):
    plan = make_plan(batch=RAMP)
    timeline = plan.timeline
    assert timeline.full_steps == timeline.tokens / 8192 < timeline.steps
    assert make_plan().timeline.full_steps == make_plan().timeline.steps


WRONG = {
    "ramp_from = 9, micro = 2": "X601",
    "ramp_from = 32": "X601",
    "ramp_from = 8, ramp = 101 steps": "X602",
    "ramp_from = 8, ramp = 0 steps": "X304",
    "ramp_from = 0": "X304",
    "ramp_from = 8, ramp = 1 epoch": "X302",
    "ramp_from = 8, ramp = 120%": "X304",
}


@pytest.mark.parametrize("settings", WRONG)
def test_wrong_ramps_are_diagnostics_at_their_place(diagnostics, settings):
    found = diagnostics(batch=f"batch {{ sequence = 256, rows = 32, {settings} }}")
    (error,) = found.errors
    assert error.code == WRONG[settings] and error.span is not None


def test_a_share_of_a_budget_in_epochs_is_refused(diagnostics):
    batch = "batch { sequence = 256, rows = 32, ramp_from = 8 }"
    (error,) = diagnostics(experiment="experiment tiny { budget = 2 epochs }", batch=batch).errors
    assert error.code == "X302" and "in steps or tokens" in error.hint


def test_a_pipeline_needs_its_microbatches_in_the_first_step_too(diagnostics, make_plan):
    batch = "batch { sequence = 256, rows = 16, ramp_from = 1, ramp = 6 steps }"
    (error,) = diagnostics(batch=batch, parallel="parallel { pp 2 }").errors
    assert error.code == "X411" and error.message.startswith("in the ramp, with 1 rows a step")
    plan = make_plan(batch=batch.replace("ramp_from = 1", "ramp_from = 4"), parallel="parallel { pp 2 }")
    assert plan.node("setup.schedule_cache").args["counts"] == [4, 8, 12, 16]


def test_a_length_without_a_ramp_is_warned_of(diagnostics):
    (warning,) = diagnostics(batch="batch { sequence = 256, rows = 32, ramp = 5 steps }").warnings
    assert warning.code == "W401"


def test_means_over_the_rows_of_a_step_are_those_of_the_step(make_plan):
    nodes = {node.id for node in make_plan(batch=RAMP).nodes}
    assert "step.router_rows" not in nodes  # a dense model has no routers


def test_another_ramp_is_another_experiment_that_can_be_gone_on_with(make_plan):
    one, other = make_plan(batch=RAMP), make_plan(batch=RAMP.replace("6 steps", "8 steps"))
    assert one.config_id != other.config_id
    (reason,) = (each for each in resumable(one, other).reasons if each.path == "batch.rows")
    assert reason.text.startswith("32 from 8 over 6 steps → 32 from 8 over 8 steps")
