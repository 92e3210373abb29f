"""What a rank waits for others, whichever way torch waits: measured on each, told of the one that waited most."""

import json

import pytest
from attrs import evolve
from forked_ranks import Mutation
from projects import records
from topologies import Topology

SLEPT = 1.0
LATE_STEP = 3  # in the second one DDP orders its buckets anew, for which it waits in C++
WAYS = {
    "works of FSDP": (Topology(fsdp=2, accumulate=1), "step.forward_backward"),
    "buckets of DDP": (Topology(replicate=2, accumulate=1, sets=("parallel.stack=ddp",)), "step.forward_backward"),
    "tensors of tensor parallel": (Topology(tp=2, accumulate=1), "step.forward_backward"),
    "messages of a pipeline": (Topology(pp=2), "step.pipeline"),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_rank_that_waits_is_the_one_that_is_not_late(lab, way):
    topology, op = WAYS[way]
    trial = evolve(topology.trial("fp32", shallow=True), steps=LATE_STEP)
    sleeps = Mutation("oversleep", rank=0, step=LATE_STEP, op=op, seconds=SLEPT)
    directory = lab.run(trial, topology.layout, mutation=sleeps, saves=False).directory
    late, waiting = (json.loads((directory / f"ranks/{r:05d}.jsonl").read_text().splitlines()[-1]) for r in (0, 1))
    assert late["step"] == waiting["step"] == LATE_STEP
    assert late["step_seconds"] > SLEPT and waiting["comm_seconds"] > SLEPT / 2
    assert waiting["comm_seconds"] > late["comm_seconds"], "nobody is late for itself"
    assert waiting["comm_seconds"] <= waiting["step_seconds"]
    (logged,) = (r for r in records(directory, "metrics") if r["step"] == LATE_STEP and "loss" in r)
    for name in ("comm_seconds", "step_seconds", "data_seconds"):
        assert logged[name] == pytest.approx(max(late[name], waiting[name]), abs=1e-6), "that of the slowest rank"
    assert all(own["resident_bytes"] > 0 and own["memory_bytes"] <= logged["memory_bytes"] for own in (late, waiting))
