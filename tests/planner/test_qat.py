"""`precision { qat }` in a plan: its node, what it costs, and what is refused next to it."""

import pytest
from agreement import hold_against_the_trace
from topologies import Topology
from traces import plan_of

from xtrain.plan.serialise import dumps, from_json, to_json
from xtrain.planner.review.resumable import resumable

MODEL = "model qwen3 { dim = 64, layers = 2, heads = 4, kv_heads = 2, ffn = 192 }"
BATCH = "batch { sequence = 256, micro = 2 }"
WIDE = ("model.dim=64", "model.ffn=128", "batch.sequence=128", "launch.device=cpu")


def qat(settings: str = "weights = int4, group = 32") -> str:
    return f"precision {{ qat {{ {settings} }} }}"


def rounded(*more: str, group: str = "32", activations: str = "int8") -> tuple[str, ...]:
    given = f"precision.qat.weights=int4 precision.qat.group={group} precision.qat.activations={activations}"
    return (*WIDE, *given.split(), *more)


def floats(form: str, *more: str) -> tuple[str, ...]:
    return (*WIDE, f"precision.qat.weights={form}", f"precision.qat.activations={form}", *more)


ROWS = [(Topology(tp=2), rounded(group="row")), (Topology(tp=2), floats("nvfp4"))]
MORE = [
    (Topology(fsdp=2), rounded(activations="none")),
    (Topology(tp=2), rounded("precision.params=fp32", "precision.compute=bf16")),
    (Topology(fsdp=2), rounded("precision.params=bf16", "activation=full")),
    (Topology(tp=2), rounded("activation=selective", "parallel.tp.sequence=false")),
    (Topology(tp=2), rounded('model.frozen=["layers.1", "embed_tokens", "layers.0.mlp"]')),
    (Topology(fsdp=2), floats("mxfp4", "precision.params=fp32", "precision.compute=bf16")),
    (Topology(tp=2), floats("nvfp4", "activation=selective", "parallel.tp.sequence=false")),
    (Topology(ring=2), floats("nvfp4", "precision.params=bf16", 'model.frozen=["layers.1", "layers.0.mlp"]')),
]


@pytest.mark.parametrize(
    ("topology", "settings"),
    [*ROWS, *(pytest.param(*each, marks=pytest.mark.matrix) for each in MORE)],
    ids=lambda value: value.name if isinstance(value, Topology) else " ".join(value[4:]),
)
def test_rounded_products_cost_what_the_plan_says(topology, settings, tmp_path):
    hold_against_the_trace(plan_of(tmp_path, topology, *settings))


def test_its_node_says_what_is_rounded(make_plan):
    plan = make_plan(
        2,
        model=MODEL,
        batch=BATCH,
        precision=qat('weights = int4, group = 32, activations = int8, skip = ["layers.0.mlp"]'),
        parallel="parallel { tp 2 }",
    )
    node, ops = plan.node("setup.qat"), [node.op for node in plan.nodes]
    assert ops.index("setup.parallel.tp") < ops.index("setup.qat")
    assert node.axes == ("tp",) and node.args["group"] == 32
    assert node.args["matrices"] == {
        **{f"self_attn.{name}_proj": [0, 1] for name in "qkvo"},
        **{f"mlp.{name}_proj": [1] for name in ("gate", "up", "down")},
    }
    assert node.does == (
        "round 11 matrices of blocks, 61.4k numbers, for each product: int4, with a scale for each 32 numbers of a "
        "row; inputs to int8, with a scale and a zero point for each token; gradients pass through, parameters are "
        "not rounded; ranks of tp share scales"
    )
    assert from_json(to_json(plan)) == plan
    uneven = make_plan(model=MODEL, batch=BATCH, precision=qat("weights = int8, group = 64")).node("setup.qat")
    assert "not rounded:" not in uneven.does
    uneven = make_plan(model=MODEL.replace("192", "160"), batch=BATCH, precision=qat("weights = int8, group = 64"))
    assert uneven.node("setup.qat").does.endswith("not rounded: `mlp.down_proj`, rows of 160")


def test_every_setting_changes_the_plan_and_a_run_goes_on_under_another(make_plan):
    def made(settings: str):
        return make_plan(model=MODEL, batch=BATCH, precision=settings)

    base = "weights = int4, group = 32"
    texts = (base, "weights = int8, group = 32", "weights = int4, group = row")
    texts += (f"{base}, activations = int8", f'{base}, skip = ["down_proj"]')
    plans = [made("precision { params = fp32 }"), *(made(qat(each)) for each in texts)]
    assert len({each.id for each in plans}) == len({each.config_id for each in plans}) == 6
    assert "qat" not in dumps(plans[0])
    for other in plans[1:]:
        verdict = resumable(plans[0], other)
        assert (verdict.kind, verdict.effect) == ("safe", "rounding")
        assert {reason.path for reason in verdict.reasons} == {"precision.qat"}


REFUSED = {
    "`k_prj` matches no matrix of a block": {"precision": qat('weights = int4, group = 32, skip = ["k_prj"]')},
    "an adapter is added to products that are not": {"adapter": "adapter lora { rank = 8 }"},
    "base nf4 computes matrices for each product": {
        "precision": "precision { qat { weights = int4, group = 32 }, base nf4 }",
        "model": MODEL.replace("layers = 2", 'layers = 4, frozen = ["layers.0"]')},
    "`qat` rounds the matrices of the same products": {
        "precision": "precision { compute = fp8, qat { weights = int4, group = 32 } }"},
    "schedule zbv computes gradients of weights later": {"parallel": "parallel { pp 2 { schedule = zbv } }"},
    "rows of self_attn.q_proj have 64 numbers, not divisible by 128": {"precision": qat("weights = int4")},
    "compiled blocks keep their rounded matrices": {"compile": "compile { mode = default }"},
    "`skip` leaves out all matrices of blocks": {"precision": qat('weights = int4, group = 32, skip = ["*_proj"]')},
    "inputs are rounded to nvfp4, and weights to int4": {
        "precision": qat("weights = int4, group = 32, activations = nvfp4")},
    "a scale of nvfp4 is of all tokens": {
        "precision": qat("weights = nvfp4, activations = nvfp4"), "activation": "activation none { tile_mlp = 2 }"},
    "rows of self_attn.q_proj have 40 numbers, not divisible by 16": {
        "precision": qat("weights = nvfp4"), "model": MODEL.replace("64", "40").replace("192", "120")},
    "a scale of nvfp4 is of a whole batch": {
        "precision": "precision { batch_invariant = true, qat { weights = nvfp4, activations = nvfp4 } }"},
    "tp 2 cuts groups of 64: of self_attn.o_proj a rank has rows of 32 numbers": {
        "precision": qat("weights = int4, group = 64"), "parallel": "parallel { tp 2 }"},
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_is_refused_with_a_reason(compiled, message):
    blocks = {
        "model": MODEL.replace("layers = 2", "layers = 4"),
        "batch": "batch { sequence = 256, micro = 1, rows = 8 }",
        "precision": qat(),
    }
    blocks |= REFUSED[message]
    found = compiled(2 if "zbv" in message or "tp 2" in message else 1, **blocks)
    assert found.plan is None
    (error,) = found.diagnostics.errors
    assert error.code == ("X448" if "batch" in message else "X443") and message in error.message and error.hint


def test_floats_have_groups_of_their_own(compiled, make_plan):
    found = compiled(1, model=MODEL, batch=BATCH, precision=qat("weights = nvfp4, group = 64, activations = nvfp4"))
    (warning,) = [each for each in found.diagnostics if each.code == "W401"]
    assert "nvfp4 has a scale for each 16 numbers" in warning.message and found.plan is not None
    plain = make_plan(model=MODEL, batch=BATCH, precision=qat("weights = nvfp4, activations = nvfp4"))
    assert plain.config_id == found.plan.config_id and plain.args("setup.qat")["group"] == 16
    assert "nvfp4, with a scale for each 16 numbers of a row and one for the matrix; inputs in the same way" in (
        plain.node("setup.qat").does
    )


def test_blocks_that_are_recomputed_are_compiled(compiled):
    blocks = {"compile": "compile { mode = default }", "activation": "activation selective"}
    assert compiled(1, model=MODEL, batch=BATCH, precision=qat(), **blocks).plan is not None


def test_settings_without_it_change_nothing(compiled):
    found = compiled(1, model=MODEL, batch=BATCH, precision="precision { qat { group = 32 } }")
    (warning,) = [each for each in found.diagnostics if each.code == "W401"]
    assert "weights is none" in warning.message and found.plan is not None
