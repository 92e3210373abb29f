"""Modules that predict further tokens on layouts: what one process minimises, measures and learns."""

import pytest
from attrs import evolve
from projects import records
from topologies import BY_NAME
from trials import TOLERANCE, Laboratory, gaps

LAYOUTS = (
    "fsdp 2, three microbatches (dense)",
    "tp 2, uneven vocabulary (dense)",
    "tp 2, without loss (dense)",
    "ring 2 (dense)",
    "ulysses 2 (dense)",
    "fsdp 2 · ep 2 (moe)",
    "fsdp 2, tied (dense)",
    "replicate 2, ddp (dense)",
    "fsdp 2 · ep 2, full recomputation (moe)",
    "one rank, four microbatches (moe)",
    "pp 2, gpipe (dense)",
    "pp 2, tied (dense)",
    "pp 4, interleaved_1f1b (dense)",
    "pp 2, three microbatches (dense)",
    "pp 2 · fsdp 2 · tp 2 (dense)",
    "pp 2 · ring 2 (dense)",
    "pp 2 (moe)",
)
ORDINARY = ("tp 2, uneven vocabulary (dense)",)


@pytest.mark.parametrize(
    "layout", [pytest.param(each, marks=() if each in ORDINARY else pytest.mark.matrix) for each in LAYOUTS]
)
def test_a_layout_learns_what_one_process_does(lab: Laboratory, layout: str):
    topology = BY_NAME[layout]
    shared = (*topology.shared, "model.mtp=2", "model.mtp_weight=0.5")
    trial = evolve(topology, shared=shared).trial("fp64", shallow=True)
    alone = lab.alone(trial)
    outcome = lab.run(trial, topology.layout, saves=False)
    found, limit = gaps(outcome, alone), TOLERANCE["fp64"]
    assert not found.beyond(limit)
    assert any(".join.eh_proj." in tensor for tensor in found.tensors)
    ours, theirs = (records(one.directory, "metrics") for one in (outcome, alone))
    assert len(ours) == trial.steps
    for mine, other in zip(ours, theirs, strict=True):
        for name in ("objective", "mtp/1", "mtp/2"):
            assert mine[name] == pytest.approx(other[name], rel=limit)
        mean = (other["mtp/1"] + other["mtp/2"]) / 2
        assert other["objective"] == pytest.approx(other["loss"] + 0.5 * mean, rel=1e-9)
