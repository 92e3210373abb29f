"""`precision { base … }` in a plan: what is stored in codes, what that takes, and what is said of what does not fit."""

import pytest
from agreement import hold_against_the_trace
from topologies import Topology
from traces import is_as_planned, plan_of

from xtrain.plan.checkpoints import checkpoint_contents, mismatches, weight_mismatches
from xtrain.plan.serialise import dumps, from_json, to_json
from xtrain.planner.load import plan_from_spec
from xtrain.planner.review.page import render
from xtrain.runtime.inspect.trace import trace_plan

SHAPE = "model llama { dim = 128, layers = 2, heads = 8, kv_heads = 4, ffn = 256, frozen = [%s] }"
PART = SHAPE % '"embed_tokens", "layers.*.self_attn", "layers.1.mlp", "norm"'
BATCH = "batch { sequence = 256, micro = 2 }"
NF4 = "precision { base nf4 }"
EXPERTS = (
    "model qwen3_moe { dim = 128, layers = 2, heads = 8, experts = 4, expert_ffn = %d, "
    'frozen = ["layers.*.mlp.experts", "layers.0.mlp.gate"] }'
)


def test_the_plan_says_what_is_stored(make_plan):
    plan = make_plan(model=PART, batch=BATCH, precision=NF4)
    stored = [each for each in plan.parameters.tensors if each.quantised]
    assert {each.name for each in stored} == {
        f"layers.{layer}.self_attn.{name}_proj.weight" for layer in (0, 1) for name in "qkvo"
    } | {f"layers.1.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    (node,) = [node for node in plan.nodes if node.op == "setup.quantise"]
    assert node.args == {"base": {"kind": "nf4", "block": 64, "double": True}, "matrices": 11}
    numbers = sum(each.size for each in stored)
    # Half a byte a number, a byte for every 64 of them, and of each matrix a mean and a scale for 256 blocks.
    packed = sum(each.size * 33 // 64 + 4 * (1 + -(-each.size // 64 // 256)) for each in stored)
    (only,) = plan.estimates.classes
    assert only.memory.parameters == 4 * (plan.parameters.total - numbers) + packed
    trained = plan.parameters.trained
    assert plan.estimates.checkpoint_bytes == only.memory.parameters + 8 * trained
    assert "store 11 matrices (frozen" in " ".join(render(plan).split())
    assert from_json(to_json(plan)) == plan and dumps(plan).count('"quantised": true') == 11
    assert checkpoint_contents(plan)["base"] == node.args["base"]


def test_a_base_of_none_is_the_plan_of_before(make_plan):
    before = make_plan(model=PART)
    after = make_plan(model=PART, precision="precision { base none }")
    assert before.id == after.id and before.config_id == after.config_id
    assert '"quantised"' not in dumps(before) and "base" not in checkpoint_contents(before)
    ids = {make_plan(model=PART, precision=f"precision {{ base {base} }}").config_id
           for base in ("nf4", "int8", "fp8", "nf4 { block = 32 }", "nf4 { double = false }")}  # fmt: skip
    assert len(ids) == 5 and before.config_id not in ids
    assert make_plan(model=PART, precision="precision { base nf4 { block = 64 } }").config_id in ids


def test_a_checkpoint_is_of_one_base(make_plan):
    none, nf4, int8 = (
        checkpoint_contents(make_plan(model=PART, precision=f"precision {{ base {base} }}"))
        for base in ("none", "nf4", "int8")
    )
    assert not mismatches(nf4, nf4)
    (other,) = mismatches(nf4, int8)
    assert other.path == "precision.base" and other.text.startswith("nf4, 8-bit scales of 64 numbers → int8")
    (begun,) = mismatches(none, nf4)
    assert "checkpoint.pretrained" in begun.text
    (back,) = mismatches(nf4, none)
    assert back.path == "precision.base" and "export --dequantise" in back.text
    # Weights alone: those in a number format are stored, those in codes are as they are.
    assert not weight_mismatches(none, nf4) and not weight_mismatches(nf4, nf4)
    assert [each.path for each in weight_mismatches(nf4, int8)] == ["precision.base"]
    assert [each.path for each in weight_mismatches(nf4, none)] == ["precision.base"]
    less = checkpoint_contents(make_plan(model=SHAPE % '"layers.*.self_attn"', precision=NF4))
    assert [each.path for each in weight_mismatches(nf4, less)] == ["model.frozen"]


@pytest.mark.parametrize(("blocks", "message", "hint"), [
    ({"model": SHAPE % ""}, "base nf4 has nothing to store: no matrix of a block is frozen", "freeze some"),
    ({"model": SHAPE % '"embed_tokens", "norm"'}, "base nf4 has nothing to store", "freeze some"),
    ({"model": PART, "parallel": "parallel { tp 4 }"}, "tp 4 cuts blocks of 64: of self_attn.o_proj.weight (128 × ",
        "write `base nf4 { block = 32 }`"),
    ({"model": PART.replace("256", "200"), "parallel": "parallel { tp 2 }"}, "tp 2 cuts blocks of 64: of mlp.down_",
        "use a smaller tp, or leave `base` out"),
    ({"model": EXPERTS % 96}, "rows of mlp.experts.gate_proj (4 × 128 × 96) are 96 wide",
        "write `base nf4 { block = 32 }`"),
    ({"model": EXPERTS % 100}, "rows of mlp.experts.gate_proj (4 × 128 × 100) are 100 wide", "leave `base` out"),
    ({"model": PART, "precision": "precision { base nf4 { block = 80 } }"}, "block 80 is not a power of two",
        "use block 64"),
])  # fmt: skip
def test_what_cannot_be_stored(compiled, blocks, message, hint):
    found = compiled(**{"precision": NF4, **blocks}, world=4 if "tp 4" in str(blocks) else None).diagnostics.errors
    assert [wrong.code for wrong in found] == ["X438"]
    assert message in found[0].message and found[0].hint is not None and hint in found[0].hint


def test_an_export_says_that_it_writes_the_values_of_codes(compiled, make_plan):
    (wrong,) = compiled(model=PART, precision=NF4, more='on finish export { to = "m" }').diagnostics.errors
    assert wrong.code == "X525" and wrong.hint == "write `dequantise = true` to export dequantized values"
    plan = make_plan(model=PART, precision=NF4, more='on finish export { to = "m", dequantise = true }')
    (node,) = [node for node in plan.nodes if node.op == "tick.export"]
    assert node.args["dequantise"] is True
    plain = make_plan(model=PART, more='on finish export { to = "m" }')
    (node,) = [node for node in plain.nodes if node.op == "tick.export"]
    assert "dequantise" not in node.args
    (idle,) = compiled(model=PART, more='on finish export { to = "m", dequantise = true }').diagnostics.warnings
    assert idle.code == "W401" and "no matrix is quantized" in idle.message


DENSE = ('model.frozen=["embed_tokens", "layers.0", "layers.*.self_attn"]', "model.ffn=64", "precision.base.kind=nf4",
         "precision.base.block=32")  # fmt: skip
MOE = ('model.frozen=["embed_tokens", "layers.*.mlp.experts"]', "model.experts=4", "model.expert_ffn=32",
       "precision.base.kind=nf4", "precision.base.block=32")  # fmt: skip
INT8 = (*DENSE[:2], "precision.base.kind=int8", "precision.base.block=32")
FEW = [
    Topology(fsdp=2, tp=2, shared=DENSE, note="nf4"),
]
MORE = [
    Topology(fsdp=2, ep=2, model="moe", shared=MOE, note="nf4"),
    Topology(pp=2, shared=DENSE, note="nf4"),
    Topology(fsdp=2, shared=INT8, note="int8"),
    Topology(fsdp=2, shared=DENSE, sets=("activation.mode=selective",), note="nf4, selective recomputation"),
    Topology(fsdp=2, shared=DENSE, sets=("activation.mode=full",), note="nf4, full recomputation"),
    Topology(replicate=2, shared=DENSE, sets=("parallel.stack=ddp",), note="nf4, ddp"),
]


@pytest.mark.matrix
@pytest.mark.parametrize("topology", [*FEW, *MORE], ids=lambda topology: topology.name)
def test_what_is_stored_costs_what_the_plan_says(topology, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hold_against_the_trace(plan_of(tmp_path, topology, params="fp32"))


SEVEN = """
experiment seven { budget = 100 steps }
model llama { dim = 4096, layers = %d, heads = 32, ffn = 11_008, vocab = 32_000 }
adapter lora { rank = 16, alpha = 32 }
tokenizer bytes
dataset own { source = synthetic() }
batch { sequence = 2048, micro = 1 }
optimizer adamw { lr = 2e-4 }
precision { params = bf16, base nf4 }
activation full
launch { device = cuda }
cluster other { memory = 24 GiB, devices = 1, nodes = 1 }
"""


def test_seven_billion_parameters_are_trained_on_one_card_of_24_gib(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "seven.xtrain"
    path.write_text(SEVEN % 32)
    plan = plan_from_spec(path).plan
    assert plan is not None
    matrices = 32 * (4 * 4096**2 + 3 * 4096 * 11_008)
    memory = plan.estimates.classes[0].memory
    beside = sum(4 * (1 + -(-each.size // 64 // 256)) for each in plan.parameters.tensors if each.quantised)
    others = sum(each.size for each in plan.parameters.tensors if not each.quantised)
    assert memory.parameters == matrices * 33 // 64 + beside + 2 * others  # 3.8 GB in place of 13.5
    assert 3.7e9 < memory.parameters < 4.0e9
    assert memory.total_bytes < 24 * 2**30 and "of 24.0 GiB" in render(plan)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "sequence",
    [pytest.param(2048, id="the loss is the most"), pytest.param(32, id="the values of a matrix are the most")],
)
def test_blocks_of_that_width_cost_what_the_plan_says(tmp_path, monkeypatch, sequence):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "seven.xtrain"
    path.write_text(SEVEN.replace("sequence = 2048", f"sequence = {sequence}") % 2)
    plan = plan_from_spec(path).plan
    assert plan is not None
    (closed,), (traced,) = plan.estimates.classes, trace_plan(plan)
    is_as_planned(plan, traced)
    assert closed.memory.parameters == traced.memory.parameters
    assert closed.memory.total_bytes - closed.memory.reserve == pytest.approx(traced.memory.total_bytes, rel=0.05)
