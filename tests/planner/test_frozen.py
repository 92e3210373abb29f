"""`model { frozen = … }` in a plan: what is trained, what that costs, and what is said of patterns that do not fit."""

import pytest
from agreement import hold_against_the_trace
from topologies import SCHEDULES, TIED, ZBV, Topology
from traces import plan_of

from xtrain.plan.checkpoints import checkpoint_contents, mismatches
from xtrain.plan.parameters import covers
from xtrain.plan.serialise import dumps, from_json, to_json
from xtrain.planner.derive.modules import modules_of
from xtrain.planner.review.page import render

SHAPE = "model llama {{ dim = 64, layers = 4, heads = 8, kv_heads = 4, ffn = 192{frozen} }}"
BATCH = "batch { sequence = 256, micro = 2 }"
NOTHING = SHAPE.format(frozen="")


def shape(*patterns: str, more: str = "") -> str:
    names = ", ".join(f'"{pattern}"' for pattern in patterns)
    return SHAPE.format(frozen=f", frozen = [{names}]{more}")


@pytest.mark.parametrize(("pattern", "means"), [
    ("layers", True),
    ("layers.2", True),
    ("layers.0-3", True),
    ("layers.2-2.mlp", True),
    ("layers.*.mlp.up_proj.weight", True),
    ("layers.*.mlp.u*", True),
    ("*", True),
    ("layers.3-9", False),
    ("layer", False),
    ("mlp", False),
    ("layers.2.mlp.up", False),
    ("layers.2.mlp.up_proj.weight.x", False),
])  # fmt: skip
def test_what_a_pattern_means(pattern, means):
    assert covers(pattern, "layers.2.mlp.up_proj.weight") == means


def test_the_plan_lists_what_is_trained_and_what_is_not(make_plan):
    plan = make_plan(model=shape("embed_tokens", "layers.0-1", "layers.*.self_attn.q_proj"), batch=BATCH)
    block, q, table = 4 * 64 + 3 * 64 * 192, 64 * 64, 258 * 64
    sizes = {tensor.name: tensor.size for tensor in plan.parameters.tensors}
    block = sum(size for name, size in sizes.items() if name.startswith("layers.0."))
    frozen = modules_of(plan.parameters, trained=False)
    assert [(each.name, each.parameters) for each in frozen] == [
        ("embed_tokens", table),
        ("layers.0-1", 2 * block),
        ("layers.2-3.self_attn.q_proj", 2 * q),
    ]
    trained = {each.name: each.parameters for each in modules_of(plan.parameters, trained=True)}
    assert (
        trained["layers.2-3.mlp"] == 2 * 3 * 64 * 192
        and trained["norm"] == 64
        and "layers.2-3.self_attn" not in trained
    )
    assert sum(trained.values()) == plan.parameters.trained == plan.parameters.total - table - 2 * block - 2 * q
    text = render(plan)
    assert f"frozen  {table + 2 * block + 2 * q:,}: embed_tokens" in text and "layers.0-1" in text
    (node,) = [node for node in plan.nodes if node.op == "setup.freeze"]
    assert node.args == {"parameters": table + 2 * block + 2 * q, "format": "fp32"}
    assert from_json(to_json(plan)) == plan and dumps(plan).count('"trained": false') == 1 + 2 * 9 + 2


def test_blocks_without_a_backward_are_not_computed_again(make_plan):
    plan = make_plan(model=shape("embed_tokens", "layers.0-1"), activation="activation full")
    assert "recompute 2 of 4 blocks" in plan.node("setup.activation").does


def test_nothing_frozen_is_the_plan_of_before(make_plan):
    before, after = make_plan(model=NOTHING), make_plan(model=SHAPE.format(frozen=", frozen = []"))
    assert before.id == after.id and before.config_id == after.config_id
    assert '"trained": false' not in dumps(before) and '"frozen"' not in dumps(before)


def test_other_spellings_of_the_same_are_the_same_experiment(make_plan):
    ids = {
        make_plan(model=shape(*patterns)).config_id
        for patterns in (("layers.0", "layers.1"), ("layers.0-1",), ("layers.[01].*",), ("layers.1", "layers.0.*"))
    }
    assert len(ids) == 1 and make_plan(model=NOTHING).config_id not in ids


def test_frozen_weights_have_no_states(make_plan):
    def memory(*patterns, **blocks):
        (only,) = make_plan(model=shape(*patterns) if patterns else NOTHING, batch=BATCH, **blocks).estimates.classes
        return only

    whole, half = memory(), memory("embed_tokens", "layers.0-1")
    plan = make_plan(model=shape("embed_tokens", "layers.0-1"), batch=BATCH)
    trained = plan.parameters.trained
    assert half.memory.parameters == whole.memory.parameters == 4 * plan.parameters.total
    assert half.memory.gradients == 4 * trained and half.memory.optimizer == 8 * trained
    assert half.memory.activations < 0.55 * whole.memory.activations  # of two blocks of four
    # Forward of all, and gradients of inputs and weights of two blocks and the head; the lowest norm passes none on.
    mixed = "precision { params = fp32, compute = bf16 }"
    assert memory("layers.0-1", precision=mixed).memory.parameters == sum(
        (4 if tensor.trained else 2) * tensor.size for tensor in make_plan(model=shape("layers.0-1")).parameters.tensors
    )
    assert plan.estimates.checkpoint_bytes == 4 * plan.parameters.total + 8 * trained


def test_operations_are_those_that_gradients_need(make_plan):
    """Of every product the forward; of blocks 2 and 3 and the head both gradients. Where the first norm of block 2 is
    frozen too, its first three matrices give none to what they take."""
    matrices, qkv, head = 64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 192, 64 * 64 + 2 * 64 * 32, 258 * 64
    plan = make_plan(model=shape("embed_tokens", "layers.0-1"), batch=BATCH)
    assert plan.estimates.work.position == 2 * 4 * matrices + 4 * 2 * matrices + 6 * head
    assert plan.estimates.work.pair == 64 * (4 * 2 + 12 * 2)
    less = make_plan(model=shape("embed_tokens", "layers.0-1", "layers.2.input_layernorm"), batch=BATCH)
    assert less.estimates.work.position == plan.estimates.work.position - 2 * qkv
    whole = make_plan(model=NOTHING, batch=BATCH)
    assert whole.estimates.work.position == 6 * (4 * matrices + head) and whole.estimates.work.pair == 64 * 12 * 4


@pytest.mark.parametrize(("patterns", "message", "hint"), [
    (("embed_token",), "no parameter of the model is in `embed_token`", "did you mean `embed_tokens`?"),
    (("layers.0", "layers.7"), "no parameter of the model is in `layers.7`", "the blocks are 0 to 3"),
    (("layers.4-7.mlp",), "no parameter of the model is in `layers.4-7.mlp`", "the blocks are 0 to 3"),
    (("layers.0.mlp.gate",), "no parameter of the model is in `layers.0.mlp.gate`",
        "in `layers.0.mlp` there are gate_proj, up_proj, down_proj"),
    (("layers.*.experts",), "no parameter of the model is in `layers.*.experts`", "in `layers.*` there are"),
    (("norm.weight.x",), "no parameter of the model is in `norm.weight.x`", "`norm.weight` is a parameter"),
    (("*",), "every parameter is frozen, so there is nothing to train", "remove a part of the model"),
])  # fmt: skip
def test_patterns_that_do_not_fit(compiled, patterns, message, hint):
    (wrong,) = compiled(model=shape(*patterns)).diagnostics.errors
    assert wrong.code == "X434" and wrong.message == message and wrong.hint is not None and hint in wrong.hint


def test_a_tied_head_is_the_embedding(compiled):
    (wrong,) = compiled(model=shape("lm_head", more=", tie_embeddings = true")).diagnostics.errors
    assert wrong.code == "X434" and wrong.hint is not None and "embed_tokens" in wrong.hint


def test_a_pattern_that_freezes_nothing_more_is_said(compiled):
    (idle,) = compiled(model=shape("layers.0-1", "layers.1.mlp")).diagnostics.warnings
    assert idle.code == "W401" and "`layers.1.mlp` freezes nothing" in idle.message


def test_a_state_fits_a_plan_that_freezes_the_same(make_plan):
    none, some, more = (
        checkpoint_contents(make_plan(model=shape(*each) if each else NOTHING))
        for each in ((), ("layers.0",), ("layers.0", "norm"))
    )
    assert not mismatches(some, some) and "frozen" not in none
    (thawed,) = mismatches(some, none)
    assert thawed.path == "model.frozen" and "no optimizer state" in thawed.text
    (frozen,) = mismatches(none, some)
    assert frozen.path == "model.frozen" and "trained in the checkpoint and frozen here" in frozen.text
    assert "norm.weight: " in str(mismatches(some, more)[0])


LOW = ('model.frozen=["embed_tokens", "layers.0"]',)
HALF = ('model.frozen=["embed_tokens", "layers.0-1"]',)
MIDDLE = ('model.frozen=["layers.1", "layers.*.mlp.up_proj", "norm"]',)
EXPERTS = ('model.frozen=["embed_tokens", "layers.0", "layers.*.mlp.experts.up_proj"]',)

FEW = [
    Topology(fsdp=2, ep=2, model="moe", shared=EXPERTS, note="some matrices of experts"),
]
MORE = [
    Topology(fsdp=2, shared=MIDDLE, note="within units"),
    Topology(tp=2, shared=LOW, note="low"),
    Topology(fsdp=2, shared=HALF, note="half"),
    Topology(fsdp=2, shared=(*LOW, *TIED), note="low, tied"),
    Topology(fsdp=2, shared=HALF, sets=("activation.mode=full",), note="half, full recomputation"),
    Topology(replicate=2, shared=LOW, sets=("parallel.stack=ddp",), note="low, ddp"),
    Topology(ring=2, shared=LOW, sets=("parallel.cp.fold=none",), note="low, fold none"),
    Topology(tp=2, fsdp=2, shared=MIDDLE, note="within units"),
    Topology(pp=2, shared=LOW, note="low"),
    Topology(pp=2, shared=HALF, sets=ZBV, note="half, zbv"),
    Topology(pp=2, shared=LOW, sets=SCHEDULES["interleaved_1f1b"], note="low, interleaved_1f1b"),
]


@pytest.mark.matrix
@pytest.mark.parametrize(
    "topology",
    [*FEW, *MORE],
    ids=lambda topology: topology.name,
)
def test_a_frozen_part_costs_what_the_plan_says(topology, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hold_against_the_trace(plan_of(tmp_path, topology, params="fp32", shallow=False))


@pytest.mark.matrix
def test_a_stage_that_trains_nothing_costs_what_the_plan_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = plan_of(tmp_path, Topology(pp=2, shared=HALF), params="fp32", shallow=False)
    hold_against_the_trace(plan)
    first, last = plan.estimates.classes
    assert first.memory.gradients == first.memory.optimizer == 0 < last.memory.gradients
