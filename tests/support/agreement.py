"""What a plan says that ranks hold and send, against the traced program."""

import pytest
from traces import is_as_planned

from xtrain.plan.estimates import Memory, RankClass
from xtrain.plan.plan import Plan, Traced
from xtrain.planner.review.costs import sums_of_groups
from xtrain.runtime.inspect.trace import trace_plan

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
    return sums_of_groups(plan.mesh, one.traffic)
