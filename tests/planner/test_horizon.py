"""Amounts in epochs: as they stand in a plan, and what becomes of them once the data is counted."""

import json
from fractions import Fraction
from math import ceil, gcd

import pytest
from attrs import evolve
from examples import drawn
from hypothesis import example, given
from hypothesis import strategies as st
from model_folders import Folder

from xtrain.dsl.load import load_spec
from xtrain.plan.arithmetic import Arithmetic, Counts
from xtrain.plan.plan import Counted, PlanPhase, PlanTick, Timeline, Uncounted
from xtrain.plan.serialise import from_json, plan_id, to_json
from xtrain.plan.step_sizes import StepSizes
from xtrain.plan.timeline import (
    counted_rate,
    counted_timeline,
    is_due,
    known_timeline,
    next_due,
    passes,
    times_due,
    waits,
)
from xtrain.planner.compile import compile_plan
from xtrain.planner.load import plan_from_spec
from xtrain.planner.review.page import render
from xtrain.planner.rules.validate import check_counted

from .conftest import spec_text

amounts = st.decimals("0.01", "4", places=2).map(float)
EPOCHS = "experiment tiny { budget = 2 epochs }"
LATE = {
    "experiment": EPOCHS,
    "scheduler": "scheduler cosine { warmup = 50 steps }",
    "phase": "phase late { from = 500 steps, lr_scale = 0.5 }",
    "every": "every 300 steps eval code",
    "launch": "launch { stop_at = 400 steps }",
    "more": "ema { every = 100 }",
}


def counted(rows):
    """A data set of so many rows, as a cache would know it."""
    return lambda plan: Counted(rows=dict.fromkeys(plan.node("setup.loader").args["datasets"], rows), stores={})


def timeline(budget, tick, share, phase, stop):
    """One of each kind: a tick in epochs, one in a share, a phase, a stop."""
    shares = {"a": 1.0}
    first = PlanPhase(name="train", first=0, fraction=None, shares=shares)
    late = PlanPhase(name="late", first=None, fraction=None, epochs=phase, shares=shares)
    ticks = (PlanTick(nodes=("x",), epochs=tick), PlanTick(nodes=("y",), fraction=share))
    return Timeline(
        steps=None, tokens=None, epochs=budget, phases=(first, late), ticks=ticks, triggers=(),
        stop_at_amount=Uncounted(epochs=stop), stop_after_amount=Uncounted(epochs=stop),
    )  # fmt: skip


@drawn(30, 600)
@given(
    rows=st.integers(1, 30),
    each=st.integers(1, 25),
    sequence=st.integers(1, 9),
    budget=amounts,
    tick=amounts,
    share=st.integers(1, 100),
    phase=amounts,
    stop=amounts,
    begun=st.integers(0, 40),
    before=st.integers(1, 25),
    first=st.integers(1, 24),
    ramp=st.integers(0, 30),
)
# A run that ends within its ramp, and a phase longer than it.
@example(
    rows=4, each=2, sequence=1, budget=0.01, tick=0.01, share=1, phase=0.26, stop=0.01, begun=0, before=1,
    first=1, ramp=1,
)  # fmt: skip
def test_what_is_counted_is_what_a_run_of_such_rows_comes_to(
    rows, each, sequence, budget, tick, share, phase, stop, begun, before, first, ramp
):
    """Against a run step by step, from its beginning or going on behind steps that took other rows, its steps all alike
    or growing at first."""
    done, ramp = begun * before, ramp if first < each else 0
    batch = Arithmetic(micro=1, accumulate=each, rows=each, sequence=sequence, epochs=budget)
    batch = evolve(batch, first_rows=first, ramp=ramp) if ramp else batch
    sizes, by = batch.row_sizes, gcd(first, each)

    def of(step):
        """The rows of a step, from 1."""
        if step <= begun:
            return before
        grown = Fraction(step - 1, ramp) * (each - first) if step <= ramp else each - first
        return first + grown // by * by if ramp else each

    past = StepSizes(before) if begun else None
    batch = batch.counted(Fraction(rows)).resumed(past, begun, done)
    found = counted_timeline(timeline(budget, tick, share / 100, phase, stop), batch, {"a": rows})

    def behind(epochs, taken):
        return taken >= Fraction(str(epochs)) * rows

    if behind(budget, done):  # more than all was taken: the run has ended before
        assert found.steps <= begun
        return
    steps, taken = begun, done
    while not behind(budget, taken):
        steps += 1
        taken += of(steps)
    assert found.steps == batch.steps == steps
    assert found.tokens == sum(of(step) for step in range(1, steps + 1)) * sequence

    in_epochs, in_share = found.ticks
    assert in_share.tokens == Fraction(share, 100) * Fraction(str(budget)) * rows * sequence
    period, taken = Fraction(str(tick)) * rows, done
    for step in range(begun + 1, steps + 30):
        own = of(step)
        taken += own
        assert batch.rows_before(step) == taken and batch.epochs_before(step) == taken / rows
        due = any(taken - own < n * period <= taken for n in range(int(taken // period) + 1))
        assert passes(taken * sequence, own * sequence, in_epochs.tokens) == due
        if begun == 0:
            assert is_due(in_epochs, step, sizes.times(sequence)) == due
            assert (next_due(in_epochs, step - 1, sizes.times(sequence)) == step) == due
        ended = batch.epoch_ended(step)
        assert (ended is not None) == (taken // rows > (taken - own) // rows) and ended in (None, taken // rows)
    if begun == 0:
        whole = sum(is_due(in_epochs, step, batch.sizes) for step in range(1, steps + 1))
        assert times_due(in_epochs, steps, batch.sizes) == whole

    for name, epochs, at in (("phase", phase, found.phases[1].first), ("stop", stop, found.stop_at)):
        if behind(epochs, done):
            assert at <= begun, name
        else:
            rest = sum(of(step) for step in range(begun + 1, at))
            assert behind(epochs, done + rest + of(at)) and not behind(epochs, done + rest)
    assert found.stop_after == ceil(Fraction(str(stop)) * rows / each)
    if begun == 0:
        at_begin, at_end = batch.step_behind(phase), batch.steps_at_end(phase)
        assert behind(phase, sizes.before(at_begin)) and not behind(phase, sizes.before(at_begin - 1))
        if at_end <= steps:
            assert behind(phase, sizes.between(steps - at_end, steps))
            assert not behind(phase, sizes.between(steps - at_end + 1, steps))


def test_lengths_of_the_learning_rate_are_steps_once_the_data_is_counted(make_plan):
    plan = make_plan(scheduler="scheduler wsd { warmup = 0.5 epochs, decay = 1 epoch }", experiment=EPOCHS)
    args = plan.node("setup.scheduler").args
    assert (args["warmup"], args["decay"]) == ({"epochs": 0.5}, {"epochs": 1.0})
    batch = Arithmetic(micro=4, accumulate=1, rows=4, sequence=8, epochs=2.0).counted(Fraction(30))
    known = counted_rate(args, batch)
    assert (known["steps"], known["warmup"], known["decay"]) == (
        15,
        {"epochs": 0.5, "steps": 4},
        {"epochs": 1.0, "steps": 8},
    )


def test_a_plan_is_the_same_whether_its_data_is_counted_or_not(load):
    spec = load(
        experiment=EPOCHS, every="every 1 epoch checkpoint", launch="launch { stop_at = 50%, stop_after = 1 epoch }"
    )
    bare, found = compile_plan(spec).plan, compile_plan(spec, count=counted(50)).plan
    assert bare is not None and found is not None and waits(bare)
    assert bare.id == found.id == plan_id(found) and bare.timeline == found.timeline
    assert bare.counted is None and found.counted == Counted(rows={"code": 50}, stores={})
    assert from_json(to_json(found)) == found and from_json(to_json(bare)) == bare
    known = known_timeline(found)
    assert (known.steps, known.stop_at, known.stop_after) == (25, 13, 13)
    assert next(tick.count for tick in known.ticks if tick.epochs) == 1  # the run stops behind step 13


def test_an_epoch_is_an_amount_under_a_budget_in_steps_too(compiled):
    blocks = {"every": "every 1 epoch eval code", "phase": "phase late { from = 1.5 epochs, lr_scale = 0.5 }"}
    result = compiled(**blocks)
    assert result.plan.timeline.steps == 100 and waits(result.plan)
    assert {check.id for check in result.plan.checks if check.status == "unknown"} >= {
        "schedule.every.0.every", "schedule.phase.late.start",
    }  # fmt: skip
    assert "every 1 epoch" in render(result.plan) and "late   from 1.5 epochs" in render(result.plan)


def test_what_a_budget_in_steps_hears_one_in_epochs_hears_once_it_is_counted(load):
    """Eleven steps: warm-up, a phase, a tick, a stop and an average that do not fit, with the same codes."""
    spec = load(**LATE)
    codes = ["X602", "X607", "W601", "W603", "W605"]
    in_steps = compile_plan(load(**{**LATE, "experiment": "experiment tiny { budget = 11 steps }"}))
    assert sorted(each.code for each in in_steps.diagnostics) == sorted(codes)
    found = compile_plan(spec, count=counted(22))
    assert found.plan is None
    assert sorted(each.code for each in found.diagnostics) == sorted(codes)
    assert not list(compile_plan(spec).diagnostics)


def test_a_run_that_has_counted_hears_the_rest_where_it_stands_in_the_spec(tmp_path):
    path = tmp_path / "spec.xtrain"
    path.write_text(spec_text(**LATE))
    loaded = load_spec(path)
    plan = compile_plan(loaded.require(), spec_text=loaded.resolved_text()).plan
    assert plan is not None
    path.unlink()  # the plan carries what is needed
    found = list(check_counted(plan, Counts(epoch_rows=Fraction(22))))
    assert sorted(each.code for each in found) == ["W601", "W603", "W605", "X602", "X607"]
    places = [str(each.span) for each in found]
    expected = {str(each.span) for each in compile_plan(loaded.require(), count=counted(22)).diagnostics}
    assert set(places) == expected
    # What has been said of the plan already is not said again.
    roomy = compile_plan(loaded.require(), spec_text=loaded.resolved_text(), count=counted(4000)).plan
    assert roomy is not None
    assert not list(check_counted(roomy, Counts(epoch_rows=Fraction(4000))))


def test_a_value_of_config_json_is_no_setting_without_effect(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Folder.whole(tmp_path)
    folder.config(initializer_range=0.02)
    plan = folder.plan(more="").plan
    assert plan is not None and any(entry.origin == "config" for entry in plan.provenance)
    assert not list(check_counted(plan, Counts(epoch_rows=Fraction(4000))))


def test_a_folder_gives_the_tokenizer_of_a_run_that_has_counted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Folder.whole(tmp_path)
    words = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    end = {"id": 1, "content": "<|endoftext|>", "special": True}
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps({"model": words, "added_tokens": [end]}))
    spec = folder.spec()
    spec.write_text(spec.read_text().replace("tokenizer bytes\n", ""))
    plan = plan_from_spec(spec).plan
    assert plan is not None
    assert not list(check_counted(plan, Counts(epoch_rows=Fraction(4000))))


@pytest.mark.parametrize("rows", [10, 1000])
def test_the_order_of_phases_may_hang_on_the_data(load, rows):
    phases = "phase a { from = 30 steps, lr_scale = 2 }\nphase b { from = 0.5 epochs, lr_scale = 3 }"
    spec = load(experiment="experiment tiny { budget = 40 epochs }", phase=phases)
    bare, known = compile_plan(spec), compile_plan(spec, count=counted(rows))
    assert bare.plan is not None and known.plan is not None
    first = {phase.name: phase.first for phase in known_timeline(known.plan).phases}
    assert (first["a"] < first["b"]) == (rows == 1000)


def test_starts_that_meet_once_they_are_counted_are_reported(load):
    phases = "phase a { from = 5 steps, lr_scale = 2 }\nphase b { from = 0.5 epochs, lr_scale = 3 }"
    spec = load(experiment=EPOCHS, phase=phases)
    assert compile_plan(spec).plan is not None
    found = compile_plan(spec, count=counted(40))  # four rows a step
    assert [each.code for each in found.diagnostics] == ["X606"]
