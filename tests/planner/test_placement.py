"""What a rank owns, by name and shape: worked out by hand, against torch.chunk, and against the estimates."""

import json
from math import prod

import pytest
from examples import drawn
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st
from state_bytes import state_bytes

from xtrain.dsl.load import load_spec
from xtrain.plan.mesh import local_shapes, piece
from xtrain.plan.serialise import dumps, from_json
from xtrain.planner.compile import compile_plan

from .conftest import spec_text

DENSE = "model llama { dim = 64, layers = 4, heads = 8, kv_heads = 4, vocab = 301 }"
TIED = DENSE.replace("}", ", tie_embeddings = true }")
MOE = (
    "model qwen3_moe { dim = 64, layers = 4, heads = 8, kv_heads = 4, vocab = 300, experts = 8, expert_ffn = 40, "
    "shared_experts = 1 }"
)


def everyone(plan):
    return [local_shapes(plan, rank) for rank in range(plan.mesh.world_size)]


def test_one_rank_owns_everything(make_plan):
    plan = make_plan(model=TIED)
    assert local_shapes(plan, 0) == {tensor.name: tensor.shape for tensor in plan.parameters.tensors}
    assert list(local_shapes(plan, 0)) == [tensor.name for tensor in plan.parameters.tensors]
    assert state_bytes(plan, 0) == 16 * plan.parameters.total
    with pytest.raises(IndexError, match="rank 1 of 1"):
        local_shapes(plan, 1)


@pytest.mark.parametrize(("rows", "parts"), [(10, 4), (12, 4), (5, 4), (3, 4), (301, 8), (1, 3), (7, 1), (9, 6)])
def test_pieces_are_those_of_torch(rows, parts):
    import torch

    chunks = [len(chunk) for chunk in torch.empty(rows).chunk(parts)]
    assert [piece(rows, parts, i) for i in range(parts)] == chunks + [0] * (parts - len(chunks))


def test_uneven_shards(make_plan):
    """301 rows over 4 ranks are 76, 76, 76, 73; copies of the sharded model own the same."""
    ranks = everyone(make_plan(model=DENSE, parallel="parallel { fsdp 4 { replicate = 2 } }"))
    assert [rank["embed_tokens.weight"] for rank in ranks] == [(76, 64), (76, 64), (76, 64), (73, 64)] * 2
    assert [rank["norm.weight"] for rank in ranks] == [(16,)] * 8


def test_tensor_parallel_before_fsdp(make_plan):
    """Rank r has fsdp r // 2 and tp r % 2: 301 rows are 151 and 150 over tp, and 76 + 75 and 75 + 75 over fsdp then."""
    ranks = everyone(make_plan(model=DENSE, parallel="parallel { fsdp 2, tp 2 }"))
    assert [rank["embed_tokens.weight"] for rank in ranks] == [(76, 64), (75, 64), (75, 64), (75, 64)]
    assert [rank["lm_head.weight"] for rank in ranks] == [(76, 64), (75, 64), (75, 64), (75, 64)]
    for rank in ranks:
        assert rank["layers.1.self_attn.k_proj.weight"] == (32 // 4, 64)
        assert rank["layers.1.self_attn.o_proj.weight"] == (64 // 2, 64 // 2)
        assert rank["layers.1.mlp.down_proj.weight"] == (64 // 2, 192 // 2)
        assert rank["layers.1.input_layernorm.weight"] == (32,)


def test_shard_axes_count_from_the_outside(make_plan):
    """fsdp 2 · ring 2 · ulysses 2 ranks; folded over ring only, ulysses ranks own the same."""
    folded = everyone(make_plan(model=DENSE, parallel="parallel { fsdp 2, cp 4 { ring = 2, ulysses = 2 } }"))
    rows = [rank["embed_tokens.weight"][0] for rank in folded]
    assert rows == [piece(301, 8, index) for index in range(8)]
    ring = everyone(
        make_plan(model=DENSE, parallel="parallel { fsdp 2, cp 4 { ring = 2, ulysses = 2, fold = ring_only } }")
    )
    rows = [rank["embed_tokens.weight"][0] for rank in ring]
    assert rows == [piece(301, 4, rank // 2) for rank in range(8)] == [76, 76, 76, 76, 76, 76, 73, 73]


def test_experts(make_plan):
    """8 experts over ep 2, then their rows over ep_fsdp; dense parameters over fsdp · tp as they are."""
    ranks = everyone(make_plan(model=MOE, parallel="parallel { fsdp 4, ep 2 }"))
    assert {rank["layers.0.mlp.experts.gate_proj"] for rank in ranks} == {(4, 32, 40)}
    assert {rank["layers.0.mlp.experts.down_proj"] for rank in ranks} == {(4, 20, 64)}
    assert {rank["layers.0.mlp.gate.weight"] for rank in ranks} == {(2, 64)}
    odd = everyone(make_plan(model=MOE, parallel="parallel { fsdp 3 }"))  # 64 rows cannot be cut in 3, 8 experts can
    assert [rank["layers.0.mlp.experts.gate_proj"] for rank in odd] == [(3, 64, 40), (3, 64, 40), (2, 64, 40)]
    cut = everyone(make_plan(model=MOE, parallel="parallel { tp 2, ep 2 }"))
    assert {rank["layers.0.mlp.experts.gate_proj"] for rank in cut} == {(4, 64, 40)}
    assert {rank["layers.0.mlp.shared_experts.gate_proj.weight"] for rank in cut} == {(40, 64)}
    assert {rank["layers.0.mlp.gate.weight"] for rank in cut} == {(8, 64)}


def test_stages(make_plan):
    first, last = everyone(make_plan(model=TIED, parallel="parallel { pp 2 }"))
    assert {name.split(".")[1] for name in first if name.startswith("layers")} == {"0", "1"}
    assert {name for name in first if not name.startswith("layers")} == {"embed_tokens.weight"}
    assert {name for name in last if not name.startswith("layers")} == {"embed_tokens.weight", "norm.weight"}
    there, back = everyone(make_plan(model=DENSE, parallel="parallel { pp 2 { schedule = zbv } }"))
    assert {name.split(".")[1] for name in there if name.startswith("layers")} == {"0", "3"}
    assert {name for name in there if not name.startswith("layers")} == {
        "embed_tokens.weight",
        "norm.weight",
        "lm_head.weight",
    }
    assert all(name.startswith("layers") for name in back)


def test_copies_of_ddp_are_whole(make_plan):
    plan = make_plan(4, model=MOE, parallel="parallel { stack = ddp }")
    assert all(rank == {t.name: t.shape for t in plan.parameters.tensors} for rank in everyone(plan))


@st.composite
def layouts(draw):
    """A small world with anything on; most of them have a plan."""
    moe = draw(st.booleans())
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    tied, vocab = pick("true", "false"), pick(258, 301)
    schedule = pick("gpipe", '"1f1b"', "interleaved_1f1b", "zero_bubble", "zbv")
    cp, fold = pick(1, 1, 2, 4), pick("all", "none", "ring_only", "ulysses_only")
    axes = f"tp {pick(1, 1, 2)}, pp {pick(1, 1, 2)} {{ schedule = {schedule} }}, cp {cp} {{ fold = {fold} }}"
    axes += f", fsdp {pick(1, 2, 3, 4)} {{ replicate = {pick(1, 1, 2)} }}"
    family, ends = "llama", ""
    if moe:
        axes += f", ep {pick(1, 2, 4)}"
        family = "qwen3_moe"
        ends = f", experts = 8, expert_ffn = {pick(40, 44, 30)}, shared_experts = {pick(0, 2)}"
    model = f"model {family} {{ dim = 64, layers = {pick(4, 5, 7)}, heads = 8, kv_heads = {pick(2, 4)}, vocab = {vocab}"
    model += f", tie_embeddings = {tied}{ends} }}"
    return spec_text(
        model=model,
        parallel=f"parallel {{ {axes} }}",
        precision=f"precision {{ params = {pick('fp32', 'bf16')} }}",
        batch="batch { sequence = 256, accumulate = 4 }",
    )


@drawn(30, 600, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layouts())
def test_estimates_are_the_largest_of_what_ranks_own(tmp_path, text):
    path = tmp_path / "spec.xtrain"
    path.write_text(text)
    plan = compile_plan(load_spec(path).require()).plan
    assume(plan is not None)
    assert plan is not None
    world = plan.mesh.world_size
    by_stage: dict[int, list[int]] = {}
    for rank in range(world):
        by_stage.setdefault(plan.mesh.coordinates(rank)["pp"], []).append(state_bytes(plan, rank))
    assert [each.memory.states for each in plan.estimates.classes] == [max(sizes) for sizes in by_stage.values()]
    content = json.loads(dumps(plan))
    assert [rank["states_bytes"] for rank in content["memory"]["per_rank"]] == [
        max(by_stage[plan.mesh.coordinates(rank)["pp"]]) for rank in range(world)
    ]
    again = from_json(content)
    assert all(local_shapes(again, rank) == local_shapes(plan, rank) for rank in {0, world // 2, world - 1})
    _whole(plan)


def _whole(plan):
    """The ranks together own every element equally often: each piece of a tensor as often as there are copies of it."""
    elements = dict.fromkeys((tensor.name for tensor in plan.parameters.tensors), 0)
    for rank in range(plan.mesh.world_size):
        for name, shape in local_shapes(plan, rank).items():
            elements[name] += prod(shape)
    for tensor in plan.parameters.tensors:
        assert elements[tensor.name] % tensor.size == 0, tensor.name
        assert elements[tensor.name] >= tensor.size
