"""What a plan says that ranks hold and send, against the traced program."""

from collections import Counter

import pytest
from traces import is_as_planned

from xtrain.planner.plan import Memory, Plan, RankClass, Traced
from xtrain.runtime.tracing.trace import trace_plan

EXACT = ("parameters", "gradients", "optimizer", "unsharded", "loss")
ACTIVATIONS = 0.015  # single numbers that are alive for long; gradients that a split backward has still to send
TOTAL = 0.06


def hold_against_the_trace(plan: Plan, *, traffic: bool = True) -> None:
    for closed, traced in zip(plan.estimates.classes, trace_plan(plan), strict=True):
        is_as_planned(plan, traced)
        _compare(closed.memory, traced.memory)
        assert not traffic or calls(plan, closed) == calls(plan, traced)


def _compare(closed: Memory, traced: Memory) -> None:
    assert {name: getattr(closed, name) for name in EXACT} == {name: getattr(traced, name) for name in EXACT}
    assert closed.offloaded == traced.offloaded
    assert closed.activations == pytest.approx(traced.activations, rel=ACTIVATIONS)
    assert closed.total_bytes - closed.reserve == pytest.approx(traced.total_bytes, rel=TOTAL)


def calls(plan: Plan, one: RankClass | Traced) -> dict[tuple[tuple[int, ...], str], tuple[int, int]]:
    """Counts and bytes by operation and group of ranks: axes with equal ranks may share a group."""
    counts: Counter[tuple[tuple[int, ...], str]] = Counter()
    sizes: Counter[tuple[tuple[int, ...], str]] = Counter()
    for call in one.traffic:
        key = (_ranks(plan, call.axis), call.op)
        counts[key] += call.count
        sizes[key] += call.bytes
    return {key: (counts[key], sizes[key]) for key in counts}


def _ranks(plan: Plan, axis: str) -> tuple[int, ...]:
    """Ranks of the group of rank 0, as distances."""
    ranks = [0]
    for name in axis.split(" · "):
        found = next(a for a in (*plan.mesh.axes, *plan.mesh.expert_axes) if a.name == name)
        ranks = [rank + place * found.stride for rank in ranks for place in range(found.size)]
    return tuple(sorted(ranks))
