"""A model of which a part is frozen trains on layouts as in one process, and what is frozen stays as it was."""

import numpy as np
import pytest
from attrs import evolve
from topologies import SCHEDULES, TIED, ZBV, Topology
from trials import TOLERANCE, Laboratory, Trial, gaps, stray_shapes

LOW = ('model.frozen=["embed_tokens", "layers.0"]',)
HALF = ('model.frozen=["embed_tokens", "layers.0-1"]',)
MIDDLE = ('model.frozen=["layers.1", "layers.*.mlp.up_proj", "norm"]',)
EXPERTS = ('model.frozen=["embed_tokens", "layers.0", "layers.*.mlp.experts.up_proj"]',)
ROUTER = ('model.frozen=["layers.*.mlp.gate", "layers.1.mlp.experts"]',)
HEAD = ('model.frozen=["embed_tokens", "layers", "norm"]',)
MOE = {"model": "moe"}

UNITS = Topology(fsdp=2, shared=MIDDLE, note="within units")
IN_EXPERTS = Topology(fsdp=2, ep=2, shared=EXPERTS, note="some matrices of experts", **MOE)
ORDINARY = [
    Topology(pp=2, shared=HALF, note="a stage without any"),
]
MORE = [
    IN_EXPERTS,
    Topology(tp=2, shared=MIDDLE, note="within blocks"),
    UNITS,
    Topology(fsdp=2, shared=LOW, note="low"),
    Topology(fsdp=2, shared=HEAD, note="all but the head"),
    Topology(tp=2, shared=HEAD, note="all but the head"),
    Topology(pp=2, shared=HEAD, note="all but the head"),
    Topology(tp=2, shared=LOW, sets=("parallel.tp.sequence=false",), note="low, without sequence"),
    Topology(pp=2, shared=(*LOW, *TIED), note="low, tied"),
    Topology(pp=2, shared=(*MIDDLE, *TIED), note="within blocks, tied"),
    Topology(pp=2, shared=HALF, sets=ZBV, note="half, zbv"),
    Topology(pp=2, shared=HALF, sets=SCHEDULES["zero_bubble"], note="half, zero_bubble"),
    Topology(pp=2, shared=LOW, sets=SCHEDULES["interleaved_1f1b"], note="low, interleaved_1f1b"),
    Topology(pp=2, shared=HALF, sets=SCHEDULES["gpipe"], note="half, gpipe"),
    Topology(pp=2, fsdp=2, shared=HALF, note="half"),
    Topology(pp=2, tp=2, fsdp=2, shared=MIDDLE, note="within blocks"),
    Topology(replicate=2, shared=LOW, sets=("parallel.stack=ddp",), note="low, ddp"),
    Topology(replicate=2, fsdp=2, shared=MIDDLE, note="within units"),
    Topology(ring=2, shared=LOW, sets=("parallel.cp.fold=none",), note="low, fold none"),
    Topology(ulysses=2, shared=MIDDLE, note="within units"),
    Topology(fsdp=2, shared=HALF, sets=("activation.mode=full",), note="half, full recomputation"),
    Topology(fsdp=2, shared=MIDDLE, sets=("activation.mode=selective",), note="within units, selective recomputation"),
    Topology(fsdp=2, shared=LOW, sets=("parallel.fsdp.sync=microbatch",), note="low, summed after every microbatch"),
    Topology(fsdp=2, shared=ROUTER, note="routers", **MOE),
    Topology(tp=2, ep=2, shared=ROUTER, note="routers", **MOE),
    Topology(fsdp=2, ep=2, shared=HALF, sets=("activation.mode=full",), note="half, full recomputation", **MOE),
    Topology(pp=2, tp=2, ep=2, shared=EXPERTS, sets=ZBV, note="some matrices of experts, zbv", **MOE),
]


@pytest.mark.parametrize(
    "topology",
    [*ORDINARY, *(pytest.param(each, marks=pytest.mark.matrix) for each in MORE)],
    ids=lambda topology: topology.name,
)
def test_a_layout_trains_what_one_process_trains(lab: Laboratory, topology: Topology):
    lab.same_as_one_process(evolve(topology.trial("fp64"), steps=2), topology.layout)


def test_what_is_frozen_stays_and_what_is_not_learns_as_before(lab: Laboratory):
    """One step: weights that are trained have the gradients that they have where all are, and so the same moments."""
    frozen = ("embed_tokens.", "layers.0.", "layers.1.mlp.up_proj.")
    trial = Trial(clip="none", steps=1)
    part = evolve(trial, settings=('model.frozen=["embed_tokens", "layers.0", "layers.1.mlp.up_proj"]',))
    whole, half, before = (
        lab.alone(each).tensors for each in (trial, part, evolve(trial, settings=("optimizer.lr=1e-30",)))
    )
    weights = {name for name in whole if name.startswith(("embed_tokens.", "layers.", "norm.", "lm_head."))}
    still = {name for name in weights if name.startswith(frozen)}
    moments = {name for name in whole if name.startswith("optimizer.")}
    own = {name for name in moments if not name.removeprefix("optimizer.").startswith(frozen)}
    assert len(still) == 11 and half.keys() == weights | own and moments - own
    assert not [name for name in still if not np.array_equal(half[name], before[name])]
    assert not [name for name in (weights - still) | own if not np.array_equal(half[name], whole[name])]


@pytest.mark.matrix
@pytest.mark.parametrize("topology", [UNITS, IN_EXPERTS], ids=lambda topology: topology.name)
def test_matrices_of_trained_parts_alone_are_made_orthogonal(lab: Laboratory, topology: Topology):
    trial = evolve(topology.trial("fp64"), steps=2, optimizer="muon { lr = 0.01")
    found = gaps(lab.run(trial, topology.layout, saves=False), lab.alone(trial))
    assert not found.beyond(TOLERANCE["fp64"])


def test_a_run_goes_on_with_the_same_parts_frozen(lab: Laboratory):
    trial = Trial(steps=4, settings=(*HALF, "model.layers=3"))
    lab.resumed(trial, (), "frozen")


@pytest.mark.slow
def test_frozen_weights_need_no_finer_copy_than_the_computation(lab: Laboratory):
    trial = Trial(params="fp32", steps=1, settings=("precision.compute=bf16",))
    part = evolve(trial, settings=(*trial.settings, *MIDDLE))
    outcome = lab.run(part, ("parallel.fsdp=2",), saves=False)
    assert not stray_shapes(lab.plan(part, ("parallel.fsdp=2",)), outcome)
    whole = lab.run(trial, ("parallel.fsdp=2",), saves=False)
    assert outcome.curve[0][1] == whole.curve[0][1]  # the loss of the first step, bit for bit
