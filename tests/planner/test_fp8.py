"""`compute = fp8` in a plan: its node, what it costs, and what it is refused beside."""

import pytest
from agreement import hold_against_the_trace
from topologies import Topology
from traces import plan_of

from xtrain.plan.serialise import dumps, from_json, to_json
from xtrain.planner.review.page import render
from xtrain.planner.review.resumable import resumable

WIDE = ("model.dim=64", "model.ffn=128", "batch.sequence=128")


def fp8(recipe: str, rest: str = "bf16", *more: str) -> tuple[str, ...]:
    return (*WIDE, "precision.params=fp32", "precision.compute=fp8", f"precision.fp8.recipe={recipe}",
            f"precision.fp8.rest={rest}", *more)  # fmt: skip


CPU, CUDA = ("launch.device=cpu",), ("launch.device=cuda",)
ROWS = [(Topology(tp=2), fp8("mxfp8", "bf16", *CPU))]
MORE = [
    (Topology(fsdp=2), fp8("rowwise", "bf16", *CUDA)),
    (Topology(tp=2), fp8("tensorwise", "fp32", *CPU)),
    (Topology(tp=2), fp8("rowwise", "bf16", *CUDA)),
    (Topology(tp=2), fp8("rowwise_with_gw_hp", "bf16", *CUDA)),
    (Topology(tp=2), fp8("rowwise", "bf16", *CPU)),
    (Topology(fsdp=2), fp8("mxfp8", "fp32", *CPU)),
    (Topology(tp=2), fp8("mxfp8_with_gw_hp", "bf16", *CUDA)),
    (Topology(tp=2), fp8("tensorwise", "bf16", *CUDA, "parallel.tp.sequence=false")),
    (Topology(ring=2, tp=2), fp8("tensorwise", "bf16", *CUDA)),
    (Topology(ulysses=2), fp8("rowwise", "fp64", *CPU)),
    (Topology(pp=2, tp=2), fp8("tensorwise", "bf16", *CUDA)),
    (Topology(tp=2), fp8("rowwise", "bf16", *CUDA, "activation=selective")),
    (Topology(tp=2), fp8("rowwise", "bf16", *CUDA, "activation=full")),
    (Topology(tp=2), fp8("rowwise", "bf16", *CUDA, 'model.frozen=["layers.1", "embed_tokens", "layers.0.mlp"]')),
    (Topology(fsdp=2, tp=2, ep=2, model="latent"), fp8("rowwise", "bf16", *CUDA, "model.shared_experts=1",
     "model.expert_ffn=32", "model.q_rank=32", "model.rope_dim=16")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("topology", "settings"),
    [*ROWS, *(pytest.param(*each, marks=pytest.mark.matrix) for each in MORE)],
    ids=lambda value: value.name if isinstance(value, Topology) else " ".join(value[4:]),
)
def test_products_in_fp8_cost_what_the_plan_says(topology, settings, tmp_path):
    hold_against_the_trace(plan_of(tmp_path, topology, *settings))


MODEL = "model qwen3 { dim = 64, layers = 2, heads = 4, kv_heads = 2, ffn = 192 }"
BATCH = "batch { sequence = 256, micro = 2 }"
H100 = "cluster h100"


def precision(settings: str = "") -> str:
    return f"precision {{ compute = fp8 {{ {settings} }} }}"


def test_its_node_stands_where_modules_are_built_and_says_what_is_multiplied(make_plan):
    plan = make_plan(2, model=MODEL, batch=BATCH, precision=precision("recipe = tensorwise, skip = [\"layers.0.mlp\"]"),
                     parallel="parallel { tp 2 }", activation="activation full", compile="compile")  # fmt: skip
    ops = [node.op for node in plan.nodes]
    assert ops.index("setup.parallel.tp") < ops.index("setup.float8") < ops.index("setup.activation")
    assert ops.index("setup.activation") < ops.index("setup.compile")
    node = plan.node("setup.float8")
    assert node.args["recipe"] == "tensorwise" and node.axes == ("tp",)
    assert node.args["matrices"] == {
        **{f"self_attn.{name}_proj": [0, 1] for name in "qkvo"},
        **{f"mlp.{name}_proj": [1] for name in ("gate", "up", "down")},
    }
    assert node.does == (
        "multiply 11 matrices of blocks, 61.4k numbers, in fp8: a scale for each tensor, gradients in e5m2; everything "
        "else in bf16; ranks of tp share scales; CUDA kernels on a GPU, emulated on a CPU"
    )
    assert plan.node("setup.parallel.fsdp").args["compute"] == "bf16"
    assert from_json(to_json(plan)) == plan


def test_what_cannot_be_multiplied_so_is_named(make_plan):
    model = (
        "model deepseek_v3 { dim = 64, layers = 2, heads = 4, q_rank = 20, kv_rank = 32, nope_dim = 16, rope_dim = 16, "
    )
    model += "value_dim = 16, experts = 4, experts_per_token = 2, expert_ffn = 32, shared_experts = 1 }"
    node = make_plan(model=model, batch=BATCH, precision=precision(), launch="launch { device = cpu }").node(
        "setup.float8"
    )
    assert not [name for name in node.args["matrices"] if "q_" in name or ".experts" in name or "gate." in name]
    assert "mlp.shared_experts.down_proj" in node.args["matrices"]
    named = "as are experts and `self_attn.q_a_proj`, 20 wide and `self_attn.q_b_proj`, 20 wide; emulated on a CPU"
    assert node.does.endswith(named)


def test_every_setting_changes_the_plan(make_plan):
    def made(precision_block: str):
        return make_plan(model=MODEL, batch=BATCH, precision=precision_block)

    plans = [made("precision { compute = bf16 }"), made(precision()), made(precision("recipe = tensorwise")),
             made(precision("recipe = rowwise_with_gw_hp")), made(precision("rest = fp32")),
             made(precision('skip = ["down_proj"]'))]  # fmt: skip
    assert len({each.id for each in plans}) == len({each.config_id for each in plans}) == 6
    assert made("precision { compute = fp8 }").id == made(precision("recipe = rowwise, rest = bf16")).id
    assert "fp8" not in dumps(plans[0])


def test_a_run_goes_on_under_it_and_under_another_recipe(make_plan):
    def made(settings: str):
        return make_plan(model=MODEL, batch=BATCH, precision=settings)

    plain, rowwise = made("precision { compute = bf16 }"), made(precision())
    for other in (plain, made(precision("recipe = tensorwise")), made(precision('skip = ["down_proj"]'))):
        for verdict in (resumable(other, rowwise), resumable(rowwise, other)):
            assert (verdict.kind, verdict.effect) == ("safe", "rounding")
            assert {reason.path for reason in verdict.reasons} == {"precision.compute"}


def test_times_count_operations_in_fp8_at_its_own_speed(make_plan):
    def made(settings: str, cluster: str = H100):
        plan = make_plan(8, model=MODEL, batch=BATCH, precision=f"precision {{ {settings} }}", cluster=cluster)
        assert plan.estimates.times is not None
        return plan

    plain, fp8 = made("compute = bf16"), made("compute = fp8 { recipe = tensorwise }")
    wide = made("compute = fp8 { recipe = rowwise_with_gw_hp }")
    assert fp8.estimates.flops_per_step == plain.estimates.flops_per_step
    matrices = sum(each.size for each in fp8.parameters.tensors if "_proj" in each.name)
    assert fp8.estimates.work.position_fp8 == 6 * matrices and wide.estimates.work.position_fp8 == 4 * matrices
    share = 6 * matrices / fp8.estimates.flops_per_token
    ratio = fp8.estimates.times.computing / plain.estimates.times.computing
    assert ratio == pytest.approx(1 - share + share * 989 / 1979)
    # What the devices could do at best, both formats at their own speed.
    ideal = fp8.estimates.times.mfu * fp8.estimates.times.step
    assert ideal / (plain.estimates.times.mfu * plain.estimates.times.step) == pytest.approx(ratio)
    assert plain.cluster.fp8_flops is None and fp8.cluster.fp8_flops == 1979e12
    assert f"the {share:.0%} in fp8 at 1.98 PFLOP/s" in " ".join(render(fp8, full=True).split())
    given = made("compute = fp8", "cluster h100 { flops = 500T }")
    assert (given.cluster.flops, given.cluster.fp8_flops) == (500e12, 1000e12)


def test_second_runs_are_counted_in_fp8(make_plan):
    found = [make_plan(model=MODEL, batch=BATCH, precision=precision(), activation=f"activation {mode}").estimates
             for mode in ("none", "selective", "full")]  # fmt: skip
    again = [each.work.position_fp8_again for each in found]
    assert again[0] == again[1] == 0 and 0 < again[2] <= found[2].work.position_fp8 // 3
    (only,) = found[2].classes
    assert only.fp8_flops == (found[2].work.position_fp8 + again[2]) * found[2].tokens_per_step


REFUSED = {
    "which devices of cluster a100 do not support": {"cluster": "cluster a100"},
    "recipe mxfp8 needs CUDA devices of compute capability 10.0, and cluster h100 has 9": {
        "precision": precision("recipe = mxfp8"), "cluster": H100},
    "kernels need widths divisible by 32, and self_attn.q_proj is 80 wide": {
        "precision": precision("recipe = mxfp8"),
        "model": "model qwen3 { dim = 80, layers = 4, heads = 5, ffn = 208 }"},
    "rest is fp64, and products in fp8 on cuda give bf16 or fp32": {
        "precision": precision("rest = fp64"), "cluster": H100},
    "`k_prj` matches no matrix of a block": {"precision": precision('skip = ["k_prj"]')},
    "an adapter is added to products that are not": {"adapter": "adapter lora { rank = 8 }"},
    "base nf4 computes matrices for each product": {
        "precision": 'precision { compute = fp8, base nf4 }',
        "model": MODEL.replace(" }", ', frozen = ["layers.0"] }')},
    "recipe rowwise has scales of all tokens, and tile_mlp multiplies some at a time": {
        "activation": "activation none { tile_mlp = 2 }"},
    "schedule zbv computes gradients of weights later": {"parallel": "parallel { pp 2 { schedule = zbv } }"},
    "kernels need widths divisible by 16, and self_attn.q_proj is 72 wide": {
        "model": "model qwen3 { dim = 72, layers = 4, heads = 9, ffn = 200 }"},
    "`skip` leaves out all matrices of blocks": {"precision": precision('skip = ["*_proj"]')},
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_is_refused_with_a_reason(compiled, message):
    blocks = {
        "model": MODEL.replace("layers = 2", "layers = 4"),
        "batch": "batch { sequence = 256, micro = 1, rows = 8 }",
        "precision": precision(),
    }
    blocks |= REFUSED[message]
    found = compiled(2 if "zbv" in message else 1, **blocks)
    assert found.plan is None
    (error,) = found.diagnostics.errors
    assert error.code == "X443" and message in error.message and error.hint


def test_tile_mlp_stands_beside_scales_of_a_token(compiled):
    found = compiled(1, model=MODEL, batch=BATCH, activation="activation none { tile_mlp = 2 }",
                     precision=precision("recipe = rowwise_with_gw_hp"))  # fmt: skip
    assert found.plan is not None, found.diagnostics.render()
    args = {node.op: node.args for node in found.plan.nodes}
    assert args["setup.float8"]["recipe"] == "rowwise_with_gw_hp"
    assert args["setup.tile_mlp"] == {"positions": 256, "pattern": "layers.*", "matches": [2]}


def test_settings_without_it_change_nothing(compiled):
    found = compiled(1, model=MODEL, batch=BATCH, precision="precision { fp8 { recipe = tensorwise } }")
    (warning,) = [each for each in found.diagnostics if each.code == "W401"]
    assert "compute is auto" in warning.message and found.plan is not None
