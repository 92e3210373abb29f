"""Rounded matrices: every layout computes what one process does, also where ranks have parts of rows and tokens."""

import pytest
from attrs import evolve
from forked_ranks import Mutation
from topologies import SHALLOW, Topology
from trials import TOLERANCE, Laboratory, gaps


def rounded(group: str = "16", activations: str = "none", weights: str = "int4") -> tuple[str, ...]:
    given = f"precision.qat.weights={weights} precision.qat.group={group} precision.qat.activations={activations}"
    return ("model.ffn=64", *SHALLOW, *given.split())


ALL = rounded("row", "int8")
# Each microbatch is a row: whoever takes it, the same tokens share a scale.
FLOATS = (*rounded("128", "nvfp4", "nvfp4"), "batch.micro=1")
ORDINARY = [
    Topology(tp=2, rows=4, shared=ALL, note="row, inputs"),
    Topology(tp=2, ring=2, accumulate=8, shared=FLOATS, note="nvfp4"),
]
MORE = [
    Topology(fsdp=2, shared=rounded("128", "mxfp4", "mxfp4"), note="mxfp4"),
    Topology(tp=2, accumulate=8, shared=FLOATS, sets=("parallel.tp.sequence=false",), note="nvfp4, without sequence"),
    Topology(fsdp=2, accumulate=4, shared=FLOATS, note="nvfp4"),
    Topology(pp=2, ulysses=2, accumulate=8, shared=FLOATS, note="nvfp4"),
    Topology(fsdp=2, ep=2, shared=rounded("128", "mxfp4", "mxfp4"), model="moe", note="mxfp4"),
    Topology(fsdp=2, shared=ALL, note="row, inputs"),
    Topology(tp=2, shared=rounded(), note="groups"),
    Topology(tp=2, shared=ALL, sets=("parallel.tp.sequence=false",), note="row, inputs, without sequence"),
    Topology(ring=2, shared=ALL, note="row, inputs"),
    Topology(pp=2, tp=2, fsdp=2, shared=ALL, note="row, inputs"),
    Topology(fsdp=2, ep=2, shared=rounded(activations="int8", weights="int8"), model="moe", note="inputs"),
    Topology(tp=2, shared=ALL, sets=("activation=selective",), note="row, inputs, selective"),
]


@pytest.mark.parametrize(
    "topology",
    [*ORDINARY, *(pytest.param(each, marks=pytest.mark.matrix) for each in MORE)],
    ids=lambda topology: topology.name,
)
def test_a_layout_computes_a_step_as_one_process_does(lab: Laboratory, topology: Topology):
    """A step, not more: the largest numbers of groups lie between two integers, and updates that are the same up to the
    last bit may round them to either."""
    trial = evolve(topology.trial("fp64", shallow=True), steps=1)
    apart = gaps(lab.run(trial, topology.layout), lab.alone(trial, saves=True))
    assert not {name: gap for name, gap in apart.beyond(TOLERANCE["fp64"]).items() if name != "eval"}


@pytest.mark.matrix
@pytest.mark.parametrize("shared", [ALL, FLOATS], ids=["int4", "nvfp4"])
def test_scales_of_a_rank_alone_are_seen(lab: Laboratory, shared: tuple[str, ...]):
    topology = Topology(tp=2, rows=4, accumulate=4 * (shared == FLOATS), shared=shared, note="scales of a rank")
    trial = evolve(topology.trial("fp64", shallow=True), steps=1)
    outcome = lab.run(trial, topology.layout, mutation=Mutation("own_scales"), saves=False)
    assert gaps(outcome, lab.alone(trial)).loss > TOLERANCE["fp64"]
