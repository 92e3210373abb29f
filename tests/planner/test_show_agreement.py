"""A trace beside the closed form: what agrees passes, what is more than a tenth apart warns with both numbers."""

from functools import cache
from pathlib import Path

import pytest
from attrs import evolve

from xtrain.plan.estimates import Memory, Traffic
from xtrain.plan.plan import Traced
from xtrain.planner.load import plan_from_spec
from xtrain.planner.review.costs import agreement, ranks_to_trace, with_trace
from xtrain.planner.review.page import render
from xtrain.runtime.inspect.trace import trace_plan

SPECS = Path(__file__).parents[2] / "specs"

MIB = 2**20
STATES = {"parameters": 100 * MIB, "gradients": 100 * MIB, "optimizer": 200 * MIB}
SENT = Traffic(axis="fsdp", op="all_gather", node="setup.parallel.fsdp", count=10, bytes=100 * MIB, exposed=False)


@pytest.fixture
def estimated(make_plan):
    """A plan of two coordinates whose closed forms say `memory` and `traffic`."""

    def build(memory, traffic=(SENT,)):
        plan = make_plan(parallel="parallel { pp 2, fsdp 2 }")
        classes = tuple(evolve(one, memory=memory, traffic=traffic) for one in plan.estimates.classes)
        return evolve(plan, estimates=evolve(plan.estimates, classes=classes))

    return build


def traced(memory, *traffic, pp=0):
    return Traced(rank=2 * pp, pp=pp, memory=memory, traffic=traffic, seconds=1.0)


def verdicts(plan):
    return {check.id: check.status for check in plan.checks if check.id.startswith("trace.")}


def test_what_agrees_passes(estimated):
    memory = Memory(**STATES, activations=50 * MIB, reserve=999 * MIB)
    seen = Memory(**STATES, activations=46 * MIB)
    plan = with_trace(estimated(memory), (traced(seen, SENT), traced(seen, SENT, pp=1)))
    assert verdicts(plan) == {
        "trace.memory.parameters": "pass",
        "trace.memory.gradients": "pass",
        "trace.memory.optimizer": "pass",
        "trace.memory.activations": "pass",
        "trace.traffic.fsdp.all_gather": "pass",
    }
    assert len(plan.traced) == 2 and plan.id == estimated(memory).id


def test_what_is_further_apart_warns_with_both_numbers(estimated):
    memory = Memory(**STATES, activations=50 * MIB)
    plan = with_trace(
        estimated(memory), (traced(memory, SENT), traced(evolve(memory, activations=40 * MIB), SENT, pp=1))
    )
    found = next(check for check in plan.checks if check.id == "trace.memory.activations")
    assert found.status == "warn"
    assert found.evidence == "formula 50.0 MiB, trace 40.0 MiB on rank 2, 20% apart"


@pytest.mark.parametrize(("size", "status"), [(90, "pass"), (89, "warn"), (111, "pass"), (112, "warn")])
def test_a_tenth_of_the_larger_is_the_bound(estimated, size, status):
    memory = Memory(**STATES, activations=100 * MIB)
    plan = with_trace(estimated(memory), (traced(evolve(memory, activations=size * MIB), SENT),))
    assert verdicts(plan)["trace.memory.activations"] == status


def test_what_is_too_small_to_matter_is_left(estimated):
    memory = Memory(**STATES, loss=1000)
    assert verdicts(with_trace(estimated(memory), (traced(Memory(**STATES), SENT),)))["trace.memory.loss"] == "pass"


def test_calls_count_as_well_as_bytes(estimated):
    memory = Memory(**STATES)
    more = evolve(SENT, count=20)
    other = evolve(SENT, axis="fsdp · ring", op="reduce_scatter")
    plan = with_trace(estimated(memory), (traced(memory, more, other),))
    assert verdicts(plan)["trace.traffic.fsdp.all_gather"] == "warn"
    assert verdicts(plan)["trace.traffic.fsdp_ring.reduce_scatter"] == "warn"  # the closed form does not have it
    found = next(check for check in plan.checks if check.id == "trace.traffic.fsdp.all_gather")
    assert "10 calls, 20 on rank 0, 50% apart" in found.evidence


def test_calls_for_several_nodes_are_one_figure(estimated):
    memory = Memory(**STATES)
    half = evolve(SENT, count=5, bytes=50 * MIB)
    parts = (half, evolve(half, node="setup.parallel.root_fsdp"))
    assert set(verdicts(with_trace(estimated(memory, parts), (traced(memory, SENT),))).values()) == {"pass"}


def test_one_rank_of_every_kind_is_traced(make_plan):
    plan = make_plan(
        model="model llama { dim = 64, layers = 8, heads = 8, kv_heads = 4 }",
        parallel="parallel { pp 4, fsdp 2 }",
        batch="batch { sequence = 256, accumulate = 4 }",
    )
    first, middle, _, last = plan.estimates.classes
    kinds = (first, evolve(middle, flops=1), evolve(middle, pp=2, flops=1), evolve(last, flops=2))
    assert ranks_to_trace(evolve(plan, estimates=evolve(plan.estimates, classes=kinds))) == (0, 2, 6)
    sent = evolve(kinds[2], traffic=(SENT,))
    all_kinds = (*kinds[:2], sent, kinds[3])
    assert ranks_to_trace(evolve(plan, estimates=evolve(plan.estimates, classes=all_kinds))) == (0, 2, 4, 6)
    assert ranks_to_trace(make_plan()) == (0,)


def test_a_second_trace_takes_the_place_of_the_first(estimated):
    memory = Memory(**STATES)
    once = with_trace(estimated(memory), (traced(memory, SENT),))
    assert with_trace(once, (traced(memory, SENT),)).checks == once.checks
    assert agreement(estimated(memory)) == ()


def test_axes_with_the_same_ranks_are_one_figure(make_plan):
    """The group of tp 2 is that of ep 2: a trace sees one group, and cannot say which axis a sum is for."""
    plan = make_plan(
        model="model qwen3_moe { dim = 64, layers = 2, heads = 4, kv_heads = 2, experts = 4, experts_per_token = 2 }",
        parallel="parallel { tp 2, ep 2 }",
    )
    (one,) = plan.estimates.classes
    tp, ep = (evolve(SENT, axis=axis, op="all_reduce", count=4, bytes=MIB) for axis in ("tp", "ep"))
    plan = evolve(plan, estimates=evolve(plan.estimates, classes=(evolve(one, traffic=(tp, ep)),)))
    seen = evolve(ep, count=8, bytes=2 * MIB)
    assert plan.mesh.group("tp") == plan.mesh.group("ep") == (0, 1)
    agrees = with_trace(plan, (traced(one.memory, seen),))
    assert verdicts(agrees)["trace.traffic.tp_or_ep.all_reduce"] == "pass"
    assert "the same" in render(agrees, color=False)
    differs = with_trace(plan, (traced(one.memory, evolve(seen, count=12)),))
    assert verdicts(differs)["trace.traffic.tp_or_ep.all_reduce"] == "warn"
    assert "together 12 calls" in render(differs, color=False)


SMALL = ("two_ranks_cpu", "pipeline_cpu")
BY_DEFAULT = (*SMALL, "moe_cpu", "dpo_cpu")
TRACED = sorted(path.stem for path in SPECS.glob("*.xtrain") if path.stem not in ("serve_cpu", "moe_16k"))


@cache
def whole(spec, sets):
    """The plan of a shipped spec, and the traces of all its stages."""
    plan = plan_from_spec(SPECS / f"{spec}.xtrain", sets).plan
    assert plan is not None
    return plan, trace_plan(plan)


@pytest.mark.parametrize(
    ("spec", "ranks"),
    [*(pytest.param(name, None, marks=() if name in BY_DEFAULT else pytest.mark.slow) for name in TRACED),
        pytest.param("moe_cpu", 4, marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_shipped_spec_agrees_with_its_trace(spec, ranks, monkeypatch):
    monkeypatch.chdir(SPECS.parent)
    if spec in SMALL:
        plan = with_trace(*whole(spec, ()))
    else:
        plan = plan_from_spec(SPECS / f"{spec}.xtrain", world=ranks).plan
        assert plan is not None
        plan = with_trace(plan, trace_plan(plan, ranks_to_trace(plan)))
    assert [check for check in plan.checks if check.id.startswith("trace.") and check.status != "pass"] == []


@pytest.mark.parametrize(("spec", "sets"), [
    ("two_ranks_cpu", ()),  # a tied table, of which autograd adds both gradients first
    pytest.param("two_ranks_cpu", ("parallel.fsdp.sync=step", "batch.rows=8"), marks=pytest.mark.slow),
    ("pipeline_cpu", ()),  # the gradient of what a stage sends is in a buffer
    pytest.param("pipeline_cpu", ("parallel.fsdp=1", "parallel.pp.schedule=gpipe"), marks=pytest.mark.slow),
    pytest.param("pipeline_cpu", ("parallel.pp.schedule=interleaved_1f1b",), marks=pytest.mark.slow),
])  # fmt: skip
def test_working_memory_of_small_models_is_as_traced(spec, sets):
    """All that differs are single numbers and what torch rounds up: a few KiB."""
    plan, found = whole(spec, sets)
    for closed, seen in zip(plan.estimates.classes, found, strict=True):
        assert closed.memory.total_bytes - closed.memory.reserve == pytest.approx(
            seen.memory.total_bytes, abs=16 * 1024
        )
