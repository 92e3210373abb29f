"""Microbatches of a pipeline that a trace counts without running them: it finds what it finds when it runs all."""

from functools import partial

import pytest
from attrs import fields
from topologies import SCHEDULES, Topology
from traces import plan_of

from xtrain.plan.estimates import Memory
from xtrain.plan.pipeline import SINGLE
from xtrain.runtime.base.ops import load_ops
from xtrain.runtime.inspect import repeats, trace
from xtrain.runtime.inspect import trace as program
from xtrain.runtime.inspect.repeats import NotAlike, Shared, StageRepeats

# What the recorded sums of microbatches that were not run would take, which is all that may be different.
SUMS = 64


def traced(plan, rank, shared=None, *, all_of_them=False):
    load_ops()
    return trace._step(plan, rank, shared, not all_of_them)


def computed(monkeypatch):
    """A list of the microbatches that stages compute from here on."""
    found = []
    run = StageRepeats._run

    def note(stage, *args, **kwargs):
        found.append(stage._now)
        return run(stage, *args, **kwargs)

    monkeypatch.setattr(StageRepeats, "_run", note)
    return found


def same(one, other):
    (memory, traffic), (memory_of_all, traffic_of_all) = one, other
    assert {(t.axis, t.op, t.node): t for t in traffic} == {(t.axis, t.op, t.node): t for t in traffic_of_all}
    for each in fields(Memory):
        assert abs(getattr(memory, each.name) - getattr(memory_of_all, each.name)) <= SUMS, each.name


def pipeline(schedule, microbatches, *sets, **axes):
    rows = 2 * microbatches * axes.get("fsdp", 1)
    layers = ("model.layers=8",) if schedule in ("interleaved_1f1b", "zbv") else ("model.layers=4",)
    sizes = {"pp": 4, "rows": rows, "accumulate": microbatches, **axes}
    return partial(plan_of, topology=Topology(sets=(*SCHEDULES[schedule], *layers, *sets), **sizes), params="fp32")


@pytest.mark.matrix
def test_ranks_of_a_pipeline_run_what_differs_and_count_the_rest(tmp_path, monkeypatch):
    plan, shared = pipeline("1f1b", 8)(tmp_path), Shared()
    ran = computed(monkeypatch)
    for rank, most in ((1, 12), (2, 2)):  # the third stage is like the second
        ran.clear()
        found = traced(plan, rank, shared)
        assert len(ran) <= most < 16
        same(found, traced(plan, rank, all_of_them=True))


@pytest.mark.matrix
@pytest.mark.parametrize("axes", [{}, {"fsdp": 2}, {"fsdp": 2, "ep": 2, "model": "moe"}, {"tp": 2}], ids=str)
@pytest.mark.parametrize(
    ("schedule", "sets"),
    [*((name, ()) for name in SCHEDULES), *((name, ("parallel.fsdp.reshard=true",)) for name in SINGLE)],
    ids=lambda each: each if isinstance(each, str) else " ".join(each),
)
def test_every_schedule(tmp_path, schedule, axes, sets):
    plan, shared = pipeline(schedule, 8, *sets, **axes)(tmp_path), Shared()
    load_ops()
    each = plan.mesh.world_size // 4
    for rank in range(0, plan.mesh.world_size, each):
        found = trace.trace_rank(plan, rank, shared)
        same((found.memory, found.traffic), traced(plan, rank, all_of_them=True))


def test_microbatches_that_are_not_alike_are_all_run(tmp_path, monkeypatch):
    plan = pipeline("gpipe", 6, "model.layers=2", pp=2)(tmp_path)
    exact = traced(plan, 0, all_of_them=True)

    def differ(*args):
        raise NotAlike

    monkeypatch.setattr(StageRepeats, "_note", differ)
    found = trace.trace_rank(plan, 0, Shared())
    same((found.memory, found.traffic), exact)


def test_what_an_earlier_microbatch_has_done_is_held_against_the_next(tmp_path, monkeypatch):
    """A fault put into the second of two microbatches that should be alike."""
    plan = pipeline("gpipe", 6, "model.layers=2", pp=2)(tmp_path)
    note, seen = StageRepeats._note, []

    def change(stage, mine, done):
        seen.append(done)
        changes = (*done.changes, (1, 8)) if len(seen) == 3 else done.changes
        note(stage, mine, repeats.evolve(done, changes=changes))

    monkeypatch.setattr(StageRepeats, "_note", change)
    with pytest.raises((NotAlike, RuntimeError)):
        traced(plan, 0)


@pytest.mark.matrix
def test_shapes_that_dtensor_works_out_take_no_memory(tmp_path, monkeypatch):
    """It calls every operator once with tensors of whole shapes: a second trace would not see them."""
    plan = plan_of(tmp_path, Topology(tp=2, fsdp=2, accumulate=1), params="fp32")
    first = traced(plan, 0)[0]
    clear = trace._clear_sharding_prop_cache
    monkeypatch.setattr(trace, "_clear_sharding_prop_cache", lambda: None)
    traced(plan, 0)
    assert traced(plan, 0)[0] == first
    clear()
    assert program.ENOUGH == 4
