"""Faults of parallelism that the table of topologies must notice, each in a row that is named here.

A row that a fault leaves untouched would be no evidence against it. That a job still runs to its end is part of these
tests: the faults are silent ones.
"""

import pytest
from forked_ranks import Mutation
from topologies import BY_DEFAULT, BY_NAME
from trials import TOLERANCE, gaps

FAULTS = [
    ("fsdp 2 (dense)", Mutation("average")),
    ("tp 2, no clipping (qwen3)", Mutation("own_summands")),
]
# Further ones in rows that run by default.
MORE = [
    ("fsdp 2 (dense)", Mutation("own_tokens")),
    ("fsdp 2 · ep 2 (moe)", Mutation("divide_experts", by=2)),
    ("pp 2, gpipe (dense)", Mutation("clip_per_stage", stages=2)),
    ("pp 2, tied (dense)", Mutation("skip", op="step.tied_grad_sync")),
    ("fsdp 2 · ring 2, fold none (dense)", Mutation("skip", op="step.context_grad_sync")),
    ("fsdp 2 · ep 2, balance bias (moe)", Mutation("skip", op="step.router_bias")),
]
# The same in other rows.
AGAIN = [
    ("tp 2 (moe)", Mutation("own_statistics")),
    ("ring 2 · ulysses 2, fold ring_only (dense)", Mutation("sync_context_over", axis="ring")),
    ("fsdp 2 · ring 2, fold none (dense)", Mutation("shard_over", axis="ring")),
    ("replicate 2 · fsdp 2 (dense)", Mutation("average")),
    ("tp 2 (moe)", Mutation("own_summands")),
    ("ring 2 · ulysses 2, fold none (dense)", Mutation("skip", op="step.context_grad_sync")),
]


def cases() -> list:
    marked = [(case, ()) for case in FAULTS] + [(case, pytest.mark.matrix) for case in (*MORE, *AGAIN)]
    return [pytest.param(row, fault, id=f"{fault} in {row}", marks=marks) for (row, fault), marks in marked]


@pytest.mark.parametrize(("row", "fault"), cases())
def test_a_fault_is_noticed(lab, row, fault):
    topology = BY_NAME[row]
    assert row in BY_DEFAULT or (row, fault) in AGAIN, "the ordinary tests must notice it"
    trial = topology.trial("fp64", shallow=True)
    found = gaps(lab.run(trial, topology.layout, mutation=fault, saves=False), lab.alone(trial))
    assert found.worst > 1e3 * TOLERANCE["fp64"]
