"""The forked ranks that other tests rest on: jobs leave nothing behind, and what goes wrong is told."""

import os
from pathlib import Path

import numpy as np
import pytest
from forked_ranks import Mutation, RanksFailed
from topologies import Topology
from trials import stray_shapes

FSDP = Topology(fsdp=2, accumulate=1)
REPLICATE = Topology(replicate=2, accumulate=1, sets=("parallel.fsdp.reshard=false",))
TRIAL = FSDP.trial("fp64", shallow=True)


@pytest.fixture(scope="module", autouse=True)
def ready(lab) -> None:
    """What ranks are forked from has all processes that stay."""
    lab.run(TRIAL, FSDP.layout, saves=False)


def children(process: int) -> list[int]:
    lines = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    found = [int(number) for number in lines]
    return found + [grandchild for child in found for grandchild in children(child)]


def same(ours, theirs) -> bool:
    return ours.curve == theirs.curve and all(
        np.array_equal(a[name], b[name]) for a, b in zip(ours.whole, theirs.whole, strict=True) for name in a
    )


def test_ranks_find_what_was_learned_once(lab):
    """Of that no rank would say that it is missing: it learns its operators itself, which takes it longer."""
    assert not lab.ranks.missed


@pytest.mark.slow
def test_a_job_is_the_same_bit_for_bit_whatever_ran_before(lab):
    trial, other = FSDP.trial("fp32", shallow=True), REPLICATE.trial("fp64", shallow=True)
    first = lab.run(trial, FSDP.layout, saves=False)
    between = lab.run(other, REPLICATE.layout, saves=False)
    assert same(lab.run(trial, FSDP.layout, saves=False), first)
    assert same(lab.run(other, REPLICATE.layout, saves=False), between)
    assert not same(between, first)


def test_parts_that_are_not_the_planned_ones_are_named(lab):
    """What the table of topologies asks of every row."""
    outcome = lab.run(TRIAL, FSDP.layout, saves=False)
    assert stray_shapes(lab.plan(TRIAL, FSDP.layout), outcome) == []
    wrong = stray_shapes(lab.plan(TRIAL, Topology(tp=2).layout), outcome)
    assert "rank 0: layers.0.self_attn.o_proj.weight is (16, 64), planned (32, 32)" in wrong
    for sizes in outcome.bytes:
        sizes["norm.weight"] += 8
    assert [text.split(":")[0] for text in stray_shapes(lab.plan(TRIAL, FSDP.layout), outcome)] == ["rank 0"]


def test_an_exception_is_quoted_and_nothing_is_left(lab):
    before = children(os.getpid())
    with pytest.raises(RanksFailed) as failure:
        lab.run(TRIAL, FSDP.layout, mutation=Mutation("fail", rank=1, how="raise"))
    assert "--- rank 1\nTraceback" in str(failure.value)
    assert "the optimizer has left the building" in str(failure.value)
    assert children(os.getpid()) == before
    lab.run(TRIAL, FSDP.layout, saves=False)


@pytest.mark.slow
def test_an_aborted_rank_shows_where_it_was(lab):
    with pytest.raises(RanksFailed) as failure:
        lab.run(TRIAL, FSDP.layout, mutation=Mutation("fail", rank=0, how="abort"))
    assert "rank 0: signal 6" in str(failure.value)
    assert "Fatal Python error: Aborted" in str(failure.value)


@pytest.mark.slow
def test_ranks_that_hang_are_ended_and_show_where_they_were(lab):
    before = children(os.getpid())
    with pytest.raises(RanksFailed) as failure:
        mutation = Mutation("fail", rank=1, how="hang")
        lab.run(TRIAL, FSDP.layout, mutation=mutation, timeout=4)
    assert "not finished within 4 s (rank 0: signal 9, rank 1: signal 9)" in str(failure.value)
    assert "_wait_for_ever" in str(failure.value), "rank 1"
    assert "--- rank 0\n(log)" in str(failure.value)
    assert children(os.getpid()) == before
