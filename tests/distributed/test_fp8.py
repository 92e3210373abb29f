"""Products in fp8: every layout computes what one process does that divides a step into the same microbatches."""

import pytest
from attrs import evolve
from forked_ranks import Mutation
from topologies import SCHEDULES, SHALLOW, Topology
from trials import TOLERANCE, Laboratory, gaps

# Each microbatch is a row: whoever takes it, the same tokens share a scale.
ROWS = ("batch.micro=1",)
MOE = {"model": "moe"}


def recipe(name: str, *more: str) -> tuple[str, ...]:
    fp8 = ("precision.compute=fp8", f"precision.fp8.recipe={name}", "precision.fp8.rest=fp64")
    return ("model.ffn=64", *SHALLOW, *fp8, *more)


TENSOR, ROW, EXACT = recipe("tensorwise", *ROWS), recipe("rowwise", *ROWS), recipe("rowwise_with_gw_hp")
# A rank of two has whole blocks of 32.
WIDE = ("model.dim=64", "model.heads=4", "model.kv_heads=4", "model.head_dim=16")
BLOCKS = recipe("mxfp8_with_gw_hp", *WIDE)
LATENT = (
    "model.q_rank=32", "model.kv_rank=16", "model.rope_dim=16", "model.nope_dim=16", "model.value_dim=16",
    "model.shared_experts=1", "model.expert_ffn=32",
)  # fmt: skip

ORDINARY = [
    Topology(fsdp=2, ep=2, shared=(*EXACT, *LATENT), model="latent", note="rowwise_with_gw_hp"),
    Topology(tp=2, shared=BLOCKS, note="mxfp8_with_gw_hp"),
]
MORE = [
    Topology(pp=2, rows=4, shared=ROW, accumulate=4, note="rowwise"),
    Topology(fsdp=2, rows=4, shared=ROW, accumulate=2, note="rowwise"),
    Topology(tp=2, rows=4, shared=TENSOR, accumulate=4, note="tensorwise"),
    Topology(ring=2, shared=BLOCKS, note="mxfp8_with_gw_hp"),
    Topology(fsdp=2, shared=recipe("mxfp8", *WIDE, *ROWS), accumulate=4, note="mxfp8"),
    Topology(tp=2, shared=recipe("mxfp8", *WIDE, *ROWS), accumulate=8, note="mxfp8"),
    Topology(fsdp=2, shared=TENSOR, accumulate=4, note="tensorwise"),
    Topology(fsdp=2, shared=EXACT, note="rowwise_with_gw_hp"),
    Topology(fsdp=4, shared=EXACT, accumulate=1, note="rowwise_with_gw_hp"),
    Topology(tp=2, shared=ROW, accumulate=8, note="rowwise"),
    Topology(tp=2, shared=EXACT, note="rowwise_with_gw_hp"),
    Topology(tp=2, shared=ROW, accumulate=8, sets=("parallel.tp.sequence=false",), note="rowwise, without sequence"),
    Topology(ring=2, shared=TENSOR, accumulate=8, note="tensorwise"),
    Topology(ulysses=2, shared=ROW, accumulate=8, note="rowwise"),
    Topology(ring=2, tp=2, shared=TENSOR, accumulate=8, note="tensorwise"),
    Topology(pp=2, shared=(*TENSOR, "model.layers=4"), accumulate=8, sets=SCHEDULES["interleaved_1f1b"],
             note="tensorwise, interleaved"),
    Topology(pp=2, tp=2, fsdp=2, shared=EXACT, note="rowwise_with_gw_hp"),
    Topology(fsdp=2, ep=2, shared=EXACT, note="rowwise_with_gw_hp", **MOE),
    Topology(fsdp=2, tp=2, ep=2, shared=(*TENSOR, *LATENT), accumulate=4, model="latent", note="tensorwise"),
    Topology(tp=2, shared=(*ROW, *LATENT), accumulate=8, model="latent", note="rowwise"),
    Topology(fsdp=2, shared=ROW, accumulate=4, sets=("activation=full",), note="rowwise, full recomputation"),
    Topology(tp=2, shared=TENSOR, accumulate=8, sets=("activation=selective",), note="tensorwise, selective"),
    Topology(fsdp=2, shared=(*EXACT, "precision.fp8.skip=[\"layers.0\", \"down_proj\"]"), note="some skipped"),
]  # fmt: skip


@pytest.mark.parametrize(
    "topology",
    [*ORDINARY, *(pytest.param(each, marks=pytest.mark.matrix) for each in MORE)],
    ids=lambda topology: topology.name,
)
def test_a_layout_trains_what_one_process_trains(lab: Laboratory, topology: Topology):
    lab.same_as_one_process(topology.trial("fp64", shallow=True), topology.layout)


@pytest.mark.matrix
@pytest.mark.parametrize("topology", [
    Topology(tp=2, rows=4, shared=ROW, accumulate=4, note="scales of a rank"),
    Topology(ring=2, shared=TENSOR, accumulate=8, note="scales of a rank"),
], ids=lambda topology: topology.name)  # fmt: skip
def test_scales_of_a_rank_alone_are_seen(lab: Laboratory, topology: Topology):
    trial = topology.trial("fp64", shallow=True)
    outcome = lab.run(trial, topology.layout, mutation=Mutation("own_scales"), saves=False)
    assert gaps(outcome, lab.alone(trial)).loss > TOLERANCE["fp64"]


@pytest.mark.matrix  # scales are computed anew: nothing of fp8 is in a checkpoint
def test_it_goes_on_bit_for_bit(lab: Laboratory):
    trial = evolve(
        Topology(tp=2, rows=4, shared=(*TENSOR, "precision.fp8.rest=bf16")).trial("fp32", shallow=True), steps=3
    )
    lab.resumed(trial, ("parallel.tp=2",), "fp8")


def test_microbatches_share_scales_of_tokens_alone(lab: Laboratory):
    """What rowwise_with_gw_hp computes does not depend on how a step is divided; what the others do, does."""
    apart = {}
    for name in ("rowwise_with_gw_hp", "rowwise", "tensorwise"):
        trial = Topology(rows=4, shared=recipe(name)).trial("fp64", shallow=True)
        apart[name] = gaps(lab.run(trial, ("batch.micro=2",), saves=False), lab.alone(trial)).worst
    assert apart["rowwise_with_gw_hp"] < TOLERANCE["fp64"] < min(apart["rowwise"], apart["tensorwise"])


def test_it_is_another_computation_near_that_of_all_else(lab: Laboratory):
    plain = evolve(Topology(shared=("model.ffn=64",)).trial("fp64", shallow=True), steps=2)
    losses = [lab.alone(plain).curve[0][1]]
    for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        losses += [lab.alone(evolve(plain, settings=recipe(name))).curve[0][1]]
    assert len(set(losses)) >= 3
    assert max(losses) - min(losses) < 0.02 * losses[0]
