"""Indexers that learn from a loss of their own, on layouts: what one process learns and measures."""

import json

import pytest
from attrs import evolve
from projects import records
from topologies import ZBV, Topology
from trials import TOLERANCE, Laboratory, gaps

RECOMPUTED = ("activation.mode=full",)
LAYOUTS = [
    Topology(fsdp=2, model="indexed"),
    Topology(tp=2, model="indexed"),
    Topology(tp=2, model="indexed", sets=("parallel.tp.sequence=false", "activation.mode=selective"), note="whole"),
    Topology(pp=2, model="indexed"),
    Topology(pp=2, model="indexed", sets=ZBV, note="zbv"),
    Topology(fsdp=2, ep=2, model="indexed"),
    Topology(ulysses=2, model="indexed"),
    Topology(replicate=2, model="indexed", sets=("parallel.stack=ddp",), note="ddp"),
    Topology(ulysses=2, tp=2, model="indexed", sets=RECOMPUTED, note="recomputed"),
    Topology(pp=2, fsdp=2, ep=2, model="indexed", sets=RECOMPUTED, note="recomputed"),
]
# Beside the sparse stage: the warm-up, in which nothing but indexers learns, from all positions.
ATTENTION = ("*_proj", "kv_a_proj_with_mqa", "*_layernorm")
NAMES = ("embed_tokens", "norm", "lm_head", "layers.*.mlp", "layers.*.*_layernorm")
FROZEN = [*NAMES, *(f"layers.*.self_attn.{name}" for name in ATTENTION)]
WARMUP = ("model.index_topk=64", f"model.frozen={json.dumps(FROZEN)}")


@pytest.mark.matrix
@pytest.mark.parametrize("stage", ["sparse", "warm-up"])
@pytest.mark.parametrize("topology", LAYOUTS, ids=lambda each: each.name)
def test_a_layout_learns_what_one_process_does(lab: Laboratory, topology: Topology, stage: str):
    topology = evolve(topology, shared=WARMUP if stage == "warm-up" else ())
    trial = topology.trial("fp64", shallow=True)
    alone, outcome = lab.alone(trial), lab.run(trial, topology.layout, saves=False)
    found, limit = gaps(outcome, alone), TOLERANCE["fp64"]
    assert not found.beyond(limit)
    assert any(".indexer.wq_b." in tensor for tensor in found.tensors)
    ours, theirs = (records(one.directory, "metrics") for one in (outcome, alone))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["indexer/loss"] == pytest.approx(other["indexer/loss"], rel=limit) and other["indexer/loss"] > 0
