"""Parameters, FLOPs and bytes against published models and numbers worked out by hand."""

import gc
from itertools import accumulate, combinations, pairwise
from random import Random

import pytest
from attrs import evolve

from xtrain.dsl.schema.parallel import Cp, Parallel
from xtrain.plan.architecture import Architecture, ParameterSpec
from xtrain.plan.mesh import Cuts, build_mesh, cuts_of, fits, tensor_rules
from xtrain.plan.parameters import count_parameters, flops_per_token, matmul_parameters
from xtrain.plan.pipeline import balance, balance_unequal, pipeline_of, stages_of_rank
from xtrain.plan.resolved import Resolved

COMMON = {"rope_theta": 1e4, "norm_eps": 1e-6, "init_std": 0.02}
LLAMA_8B = Architecture(
    family="llama", dim=4096, layers=32, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256,
    tie_embeddings=False, qk_norm=False, **COMMON,
)  # fmt: skip
QWEN3_06B = Architecture(
    family="qwen3", dim=1024, layers=28, heads=16, kv_heads=8, head_dim=128, ffn=3072, vocab=151936,
    tie_embeddings=True, qk_norm=True, **COMMON,
)  # fmt: skip
QWEN3_30B = Architecture(
    family="qwen3_moe", dim=2048, layers=48, heads=32, kv_heads=4, head_dim=128, ffn=6144, vocab=151936,
    tie_embeddings=False, qk_norm=True, experts=128, experts_per_token=8, expert_ffn=768, **COMMON,
)  # fmt: skip


def test_llama_3_8b_has_the_published_size():
    count = count_parameters(LLAMA_8B)
    assert count.total == count.active == 8_030_261_248


def test_flops_vector_of_llama_3_8b():
    """6 · 7,504,658,432 + 12 · 32 · 32 · 128 · 4096: embedding and norms left out, the head counted."""
    assert matmul_parameters(LLAMA_8B) == 7_504_658_432
    assert flops_per_token(LLAMA_8B, 4096) == 45_027_950_592 + 6_442_450_944
    assert round(flops_per_token(LLAMA_8B, 4096) / 1e9, 2) == 51.47


def test_tied_qwen3_by_hand():
    """Qwen3-0.6B. A block: q 1024·2048, k and v 1024·1024 each, o 2048·1024, three ffn matrices 1024·3072,
    two norms of 1024, two of 128 on the heads. 28 blocks, the last norm, one table for embedding and head."""
    block = 1024 * 2048 + 2 * 1024 * 1024 + 2048 * 1024 + 3 * 1024 * 3072 + 2 * 1024 + 2 * 128
    assert block == 15_730_944
    total = 28 * block + 1024 + 151936 * 1024
    assert total == 596_049_920  # what the published checkpoint holds
    assert count_parameters(QWEN3_06B).total == total
    assert not any(tensor.name == "lm_head.weight" for tensor in count_parameters(QWEN3_06B).tensors)
    # The head is a matrix product although its table is the embedding.
    assert matmul_parameters(QWEN3_06B) == total - 1024 - 28 * (2 * 1024 + 2 * 128)


def test_experts_count_by_those_a_token_uses():
    count = count_parameters(QWEN3_30B)
    experts = 48 * 128 * 3 * 2048 * 768
    assert count.total == 30_532_122_624
    assert count.active == count.total - experts * 120 // 128
    dense = 48 * (2048 * 4096 * 2 + 2 * 2048 * 512 + 128 * 2048) + 151936 * 2048
    assert matmul_parameters(QWEN3_30B) == dense + experts * 8 // 128


def test_memory_of_one_rank_is_sixteen_bytes_a_parameter(make_plan):
    plan = make_plan()
    (only,) = plan.estimates.classes
    assert only.memory.states == 16 * plan.parameters.total
    assert plan.estimates.checkpoint_bytes == 12 * plan.parameters.total
    half = make_plan(precision="precision { params = bf16 }").estimates
    assert half.classes[0].memory.states == 8 * plan.parameters.total


def test_memory_is_shared_over_fsdp(make_plan):
    """Every first dimension of this model divides by 2 (258 rows of the embedding are 129), so sharding is exact."""
    one, two = make_plan(), make_plan(parallel="parallel { fsdp 2 }")
    assert two.estimates.classes[0].memory.states * 2 == one.estimates.classes[0].memory.states
    copies = make_plan(parallel="parallel { fsdp 2 { replicate = 3 } }")
    assert copies.estimates.classes[0].memory.states == two.estimates.classes[0].memory.states


def largest(cuts, name, shape, expert=False):
    return cuts.largest([ParameterSpec(name=name, shape=shape, decays=True, expert=expert)])


def test_uneven_shards_count_as_the_largest():
    cuts = Cuts(tp=1, fsdp=4, ep=1, ep_fsdp=1, expert_dimension=1)
    assert largest(cuts, "embed_tokens.weight", (10, 3)) == 3 * 3
    assert largest(cuts, "norm.weight", (2,)) == 1
    both = Cuts(tp=2, fsdp=4, ep=1, ep_fsdp=1, expert_dimension=1, rules=tensor_rules(LLAMA_8B))
    # Output features over tp then fsdp; input features of the row-wise matrix over tp, its rows over fsdp.
    assert largest(both, "layers.0.mlp.up_proj.weight", (18, 5)) == 3 * 5
    assert largest(both, "layers.0.mlp.down_proj.weight", (9, 18)) == 3 * 9
    assert largest(both, "layers.0.self_attn.o_proj.weight", (9, 18)) == 3 * 9
    assert largest(both, "layers.0.self_attn.q_proj.weight", (18, 5)) == 3 * 5
    assert largest(both, "layers.0.input_layernorm.weight", (5,)) == 2
    # Shared experts carry the names of a feed-forward layer one part deeper, and are whole.
    assert largest(both, "layers.0.mlp.shared_experts.up_proj.weight", (18, 5)) == 5 * 5


def test_a_star_stands_for_one_part_of_a_name():
    assert fits("layers.12.mlp.up_proj", "layers.*.mlp.up_proj") and fits("lm_head", "lm_head")
    assert not fits("layers.0.inner.mlp.up_proj", "layers.*.mlp.up_proj")
    assert not fits("layers.0.mlp", "layers.*")


def test_experts_are_cut_over_the_expert_view():
    sizes = {"pp": 1, "replicate": 1, "fsdp": 4, "ring": 1, "ulysses": 1, "tp": 1}
    mesh = build_mesh(sizes, ep=2, ranks_per_node=4)
    even = cuts_of(Parallel(), mesh, evolve(QWEN3_30B, dim=10, expert_ffn=6))
    assert (even.expert_dimension, largest(even, "layers.0.mlp.experts.up_proj", (8, 6, 10), True)) == (1, 4 * 3 * 10)
    odd = cuts_of(Parallel(), mesh, evolve(QWEN3_30B, dim=10, expert_ffn=7))
    assert (odd.expert_dimension, largest(odd, "layers.0.mlp.experts.up_proj", (8, 6, 10), True)) == (0, 2 * 6 * 10)


@pytest.mark.parametrize(("fold", "ways"), [("all", 12), ("ring_only", 6), ("ulysses_only", 4), ("none", 2)])
def test_folded_context_ranks_shard_parameters(fold, ways):
    sizes = {"pp": 1, "replicate": 1, "fsdp": 2, "ring": 3, "ulysses": 2, "tp": 1}
    mesh = build_mesh(sizes, ep=1, ranks_per_node=12)
    assert cuts_of(Parallel(cp=Cp(size=6, fold=fold)), mesh, LLAMA_8B).fsdp == ways


def test_memory_by_pipeline_rank(make_plan):
    """Four equal blocks on two ranks; the first holds the embedding as well, the last one norm and head."""
    plan = make_plan(parallel="parallel { pp 2 }")
    sizes = {tensor.name: tensor.size for tensor in plan.parameters.tensors}
    block = sum(size for name, size in sizes.items() if name.startswith("layers.0."))
    first, last = (each.memory for each in plan.estimates.classes)
    assert first.parameters == 4 * (2 * block + sizes["embed_tokens.weight"])
    assert last.parameters == 4 * (2 * block + sizes["norm.weight"] + sizes["lm_head.weight"])
    tied = make_plan(
        parallel="parallel { pp 2 }",
        model="model llama { dim = 64, layers = 4, heads = 8, kv_heads = 4, tie_embeddings = true }",
    )
    # A tied table lies on both ends of the pipeline.
    assert [each.memory.parameters for each in tied.estimates.classes] == [first.parameters, last.parameters]


def test_layers_are_spread_from_the_middle():
    assert balance(8, 4) == [2, 2, 2, 2]
    assert balance(126, 16) == [7, *[8] * 14, 7]  # as Llama 3 405B was trained
    assert balance(5, 1) == [5]
    assert balance(3, 2) == [2, 1]


def test_the_ends_of_the_model_count_as_layers():
    assert balance(10, 4, 0.0, 2.0) == [3, 3, 3, 1]
    assert balance(10, 4, 1.0, 1.0) == [2, 3, 3, 2]
    assert balance(4, 4, 0.0, 9.0) == [1, 1, 1, 1]  # each stage keeps a layer, whatever the head costs
    assert balance(8, 2, 0.0, 0.6) == [4, 4]
    assert balance(8, 2, 0.0, 1.1) == [5, 3]


@pytest.mark.parametrize("case", range(20))
def test_no_other_cut_of_unequal_layers_is_cheaper(case):
    """Against all ways to cut them."""
    draw = Random(case)
    costs = draw.choices((0.5, 1.0, 1.5, 4.0), k=draw.randint(1, 9))
    stages, head = draw.randint(1, min(4, len(costs))), draw.choice((0.0, 0.7, 3.0))

    def dearest(ends: tuple[int, ...]) -> float:
        each = [sum(costs[first:last]) for first, last in pairwise((0, *ends, len(costs)))]
        return max(*each[:-1], each[-1] + head, 0.0)

    counts = balance_unequal(costs, stages, 0.0, head)
    assert sum(counts) == len(costs) and len(counts) == stages and min(counts) >= 1
    best = min(map(dearest, combinations(range(1, len(costs)), stages - 1)))
    assert dearest(tuple(accumulate(counts))[:-1]) == pytest.approx(best)
    assert balance_unequal([1.0, 1.0, 4.0, 1.0, 1.0], 2, 0.0, 0.0) == [2, 3]
    assert balance_unequal([0.3] * 3 + [1.1] * 45, 8, 0.0, 2.0) == [8, *[6] * 6, 4]


@pytest.mark.parametrize("layers", range(4, 30))
@pytest.mark.parametrize(("stages", "head"), [(2, 0.3), (3, 1.7), (4, 2.5)])
def test_no_other_way_to_spread_is_cheaper(layers, stages, head):
    """By trial: the dearest stage cannot be made cheaper by giving each stage what fits under a lower bound."""
    counts = balance(layers, stages, 0.5, head)
    ends = [0.5, *[0.0] * (stages - 2), head]
    costs = [count + end for count, end in zip(counts, ends, strict=True)]
    assert sum(counts) == layers and min(counts) >= 1
    room = sum(max(1, int(max(costs) - 1e-9 - end)) for end in ends)
    forced = max(1 + end for end in ends)  # a stage has one layer at least
    assert max(costs) == forced or room < layers


def test_stages_of_ranks():
    assert stages_of_rank(1, 4, 3, "interleaved_1f1b") == [1, 5, 9]
    pipeline = pipeline_of([3, 2, 2, 1], 2, "zbv")
    assert pipeline.spans == ((0, 2), (3, 4), (5, 6), (7, 7))
    assert pipeline.owners == ((0, 3), (1, 2))
    assert pipeline.blocks() == [4, 4] and pipeline.readers == [0]
    looped = pipeline_of([3, 2, 2, 1], 2, "interleaved_1f1b")
    assert looped.owners == ((0, 2), (1, 3))
    assert looped.readers == [0, 1] and looped.layers(1) == [3, 4, 7]


def test_shared_experts_are_counted_for_every_token():
    more = evolve(QWEN3_30B, shared_experts=2)
    extra = 48 * 3 * 2048 * 2 * 768
    assert count_parameters(more).total == count_parameters(QWEN3_30B).total + extra
    assert count_parameters(more).active == count_parameters(QWEN3_30B).active + extra
    assert matmul_parameters(more) == matmul_parameters(QWEN3_30B) + extra
    names = [tensor.name for tensor in count_parameters(more).tensors if tensor.name.startswith("layers.0.mlp.")]
    assert names[-4:] == [
        "layers.0.mlp.experts.down_proj",
        *(f"layers.0.mlp.shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")),
    ]


def test_a_plan_leaves_no_resolved_spec_in_memory(make_plan):
    def alive() -> int:
        gc.collect()
        return sum(type(each) is Resolved for each in gc.get_objects())

    before = alive()
    make_plan(optimizer="optimizer muon { lr = 1e-3 }")
    assert alive() == before
