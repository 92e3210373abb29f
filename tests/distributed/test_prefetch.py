"""Parameters that are gathered early: which units ask for which, and that nothing else is computed."""

import pytest
from agreement import hold_against_the_trace
from topologies import SCHEDULES, Topology
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from traces import plan_of
from trials import Laboratory

from xtrain.planner.load import plan_from_spec

EARLY = ("parallel.fsdp.prefetch=true",)
MTP = ("model.mtp=1", "model.expert_ffn=16", "model.shared_experts=1")
ORDINARY = [
    Topology(fsdp=4, ep=2, sets=("activation=full",), model="moe", note="early, recomputed"),
]
MORE = [
    Topology(fsdp=2, sets=EARLY, note="early"),
    Topology(fsdp=2, ep=2, sets=("parallel.fsdp.prefetch=false",), model="moe", note="late"),
    Topology(fsdp=2, model="moe", note="early"),
    Topology(fsdp=2, tp=2, sets=("parallel.fsdp.reshard=false", *EARLY), note="early, kept"),
    Topology(pp=2, fsdp=2, sets=(*SCHEDULES["interleaved_1f1b"], *EARLY), note="early, interleaved"),
    Topology(pp=2, fsdp=2, ep=2, model="moe", note="early"),
    Topology(fsdp=2, shared=MTP, model="latent", note="early, further tokens"),
    Topology(fsdp=4, ep=2, sets=("activation=selective",), model="moe", note="early, selective"),
]


@pytest.mark.parametrize(
    "topology",
    [*ORDINARY, *(pytest.param(each, marks=pytest.mark.matrix) for each in MORE)],
    ids=lambda topology: topology.name,
)
def test_a_layout_computes_what_one_process_computes(lab: Laboratory, topology: Topology):
    lab.same_as_one_process(topology.trial("fp64", shallow=True), topology.layout)


@pytest.mark.matrix  # of the others it is seen where their units are
@pytest.mark.parametrize("topology", MORE, ids=lambda topology: topology.name)
def test_a_layout_costs_what_its_plan_says(topology: Topology, tmp_path):
    hold_against_the_trace(plan_of(tmp_path, topology, params="fp32"))


@pytest.mark.matrix
@pytest.mark.parametrize(("topology", "asked"), [
    (MORE[0], ["layers.0", "layers.1"]),
    (Topology(fsdp=2), []),
    (Topology(fsdp=4, ep=2, model="moe"), ["layers.0", "layers.0.mlp.experts", "layers.1", "layers.1.mlp.experts"]),
    (ORDINARY[0], ["layers.0", "layers.0.mlp.experts", "layers.1.mlp.experts"]),
], ids=["dense", "dense, late", "experts", "experts, recomputed"])  # fmt: skip
def test_units_ask_for_the_next_one(topology, asked, tmp_path, monkeypatch):
    """In the order of a forward, and in no other: also where a backward computes blocks again; and what that costs."""
    plan, found = plan_of(tmp_path, topology, params="fp32"), []
    nodes = [node for node in plan.nodes if node.op == "setup.parallel.prefetch"]
    real = FSDPParamGroup._prefetch_unshard

    def prefetch(target: FSDPParamGroup, kind: str) -> None:
        if kind == "forward":
            found.append(target._module_fqn)
        real(target, kind)

    monkeypatch.setattr(FSDPParamGroup, "_prefetch_unshard", staticmethod(prefetch))
    hold_against_the_trace(plan)
    microbatches = topology.microbatches
    assert found[: len(asked)] == asked and len(found) == microbatches * len(asked)
    assert bool(nodes) == bool(asked)
    if nodes:
        layers = plan.architecture.layers
        assert nodes[0].args == {"units": [1 + layers * (2 if plan.architecture.is_moe else 1)]}


def test_it_concerns_what_is_gathered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = plan_of(tmp_path, Topology(model="moe"), "precision.compute=bf16")
    assert [node for node in plan.nodes if node.op == "setup.parallel.expert_fsdp"]
    assert not [node for node in plan.nodes if node.op == "setup.parallel.prefetch"]
    compiled = plan_from_spec(tmp_path / "trial.xtrain", ("parallel.fsdp=1", *EARLY), 1)
    assert "W401" in [each.code for each in compiled.diagnostics] and compiled.plan is not None
    compiled = plan_from_spec(tmp_path / "trial.xtrain", ("parallel.stack=ddp", *EARLY), 2)
    assert [each.code for each in compiled.diagnostics.errors] == ["X415"]
