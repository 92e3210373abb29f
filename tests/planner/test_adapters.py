"""`adapter lora { … }` in a plan: what is trained, what that costs, and what is said of settings that do not fit."""

import pytest
from agreement import hold_against_the_trace
from projects import Project
from topologies import SCHEDULES, TIED, ZBV, Topology
from traces import plan_of

from xtrain.plan.checkpoints import checkpoint_contents, mismatches
from xtrain.plan.serialise import dumps, from_json, to_json
from xtrain.planner.derive.modules import adapters_of, modules_of
from xtrain.planner.load import plan_from_spec
from xtrain.planner.review.page import render
from xtrain.planner.review.resumable import resumable

SHAPE = "model llama { dim = 64, layers = 4, heads = 8, kv_heads = 4, ffn = 192 }"
BATCH = "batch { sequence = 256, micro = 2 }"
SOME = 'rank = 8, targets = ["q_proj", "layers.2-3.mlp"]'


def adapted(text: str) -> str:
    return f"adapter lora {{ {text} }}"


MERGING = "adapter lora {{ rank = 2{} }}\n{}\nevery 2 steps merge"


@pytest.mark.parametrize(("adapter", "more", "said"), [
    (", dora = true", "", "dora or pissa"),
    (", init = pissa", "", "dora or pissa"),
    ("", "ema { decay = 0.9 }", "averaged weights"),
    ("", "precision { base nf4 { } }", "a quantized base"),
    ("", "parallel { stack = deepspeed }", "stack = deepspeed"),
    (', targets = ["lm_head"]', "model { tie_embeddings = true }", "tied to the embedding"),
    ("", 'on finish export { to = "x", adapter = true }', "changes the model under the adapter"),
    ("", "on finish merge", "only a tick merges"),
])  # fmt: skip
def test_merging_is_refused_where_it_would_not_be_exact(tmp_path, adapter, more, said):
    spec = Project(tmp_path).spec(more=MERGING.format(adapter, more))
    found = plan_from_spec(tmp_path / spec)
    assert any(said in each.message for each in found.diagnostics.errors)


def test_merging_needs_an_adapter_and_is_another_experiment_with_a_whole_checkpoint(tmp_path):
    def planned(more: str):
        return plan_from_spec(tmp_path / Project(tmp_path).spec(more=more))

    assert "the spec has none" in planned("every 2 steps merge").diagnostics.errors[0].message
    plain, merging, later = (
        planned(f"adapter lora {{ rank = 2 }}\n{tick}").plan
        for tick in ("", "every 2 steps merge", "every 3 steps merge { state = keep }")
    )
    assert plain is not None and merging is not None and later is not None
    assert len({plain.config_id, merging.config_id, later.config_id}) == 3
    assert [any(node.op == "setup.base" for node in plan.nodes) for plan in (plain, merging)] == [True, False]
    assert merging.estimates.checkpoint_bytes > plain.estimates.checkpoint_bytes


def test_the_plan_lists_the_matrices_of_an_adapter_and_what_is_frozen(make_plan):
    plan = make_plan(model=SHAPE, adapter=adapted(SOME), batch=BATCH)
    q, wide = 8 * (64 + 64), 8 * (64 + 192)
    assert [(each.name, each.parameters) for each in adapters_of(plan.parameters)] == [
        ("layers.0-1.self_attn.q_proj", 2 * q),
        ("layers.2-3.self_attn.q_proj", 2 * q),
        *((f"layers.2-3.mlp.{name}_proj", 2 * wide) for name in ("gate", "up", "down")),
    ]
    assert modules_of(plan.parameters, trained=True) == () and plan.parameters.trained == 4 * q + 6 * wide
    frozen = modules_of(plan.parameters, trained=False)
    assert [each.name for each in frozen] == ["embed_tokens", "layers.0-3", "norm", "lm_head"]
    text = render(plan)
    assert f"adapter {plan.parameters.trained:,}: layers.0-1.self_attn.q_proj 2.05k" in text
    assert "\n  trained " not in text
    assert plan.node("setup.adapter").args == {"kind": "lora", "seed": 1, "init": "default"}
    assert from_json(to_json(plan)) == plan and '"adapter": "layers.0.self_attn.q_proj.weight"' in dumps(plan)


def test_without_an_adapter_the_plan_says_nothing_of_any(make_plan):
    plan = make_plan(model=SHAPE)
    assert '"adapter' not in dumps(plan) and "adapter" not in checkpoint_contents(plan)["model"]


@pytest.mark.parametrize(
    ("settings", "scale"),
    [("rank = 8", 1.0), ("rank = 8, alpha = 32", 4.0), ("rank = 16, alpha = 8, scaling = rslora", 2.0)],
)  # fmt: skip
def test_the_scale_follows_from_rank_and_alpha(make_plan, settings, scale):
    plan = make_plan(model=SHAPE, adapter=adapted(settings))
    assert {each.matrices[0].scale for each in (kind.block for kind in plan.architecture.kinds)} == {scale}


def test_only_an_adapter_has_states(make_plan):
    def memory(**blocks):
        (only,) = make_plan(model=SHAPE, batch=BATCH, **blocks).estimates.classes
        return only

    whole, low = memory(), memory(adapter=adapted('rank = 8, targets = ["layers.2-3"]'))
    plan = make_plan(model=SHAPE, batch=BATCH, adapter=adapted('rank = 8, targets = ["layers.2-3"]'))
    trained = plan.parameters.trained
    assert low.memory.parameters == whole.memory.parameters + 4 * trained
    assert low.memory.gradients == 4 * trained and low.memory.optimizer == 8 * trained
    assert low.memory.activations < 0.55 * whole.memory.activations  # of two blocks of four
    # Forward of all; gradients of what the matrices of two blocks and the head are given, but for the first three;
    # and of A and B both gradients, but for the first three A.
    matrices, qkv, head = 64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 192, 64 * 64 + 2 * 64 * 32, 258 * 64
    backward = 2 * (2 * matrices - qkv) + 2 * head + 4 * trained - 2 * 3 * 8 * 64
    assert plan.estimates.work.position == 2 * (4 * matrices + head + trained) + backward


@pytest.mark.parametrize(("settings", "message", "hint"), [
    ('targets = ["q_prj"]', "no matrix of the model matches `q_prj`", "did you mean `q_proj`?"),
    ('targets = ["layers.4.mlp"]', "matches `layers.4.mlp`", "the blocks are 0 to 3"),
    ('targets = ["self_attn.gate_proj"]', "matches `self_attn.gate_proj`", "q_proj, k_proj, v_proj"),
    ('targets = ["embed_tokens"]', "matches `embed_tokens`", 'the embedding can have no adapter; `train = ["e'),
    ('targets = ["lm_*"]', "matches `lm_*`", "the head has a name of its own: write `lm_head`"),
    ('targets = ["lm_head"], dora = true', "an adapter of the head has no dora", "the head out of targets"),
    ('targets = ["lm_head"], dropout = 0.1', "an adapter of the head has no dropout", "the head out of targets"),
    ('targets = ["lm_head"], init = pissa', "an adapter of the head has no pissa", "the head out of targets"),
    ('targets = ["norm"]', "matches `norm`", '`train = ["norm"]`'),
    ('targets = ["input_layernorm"]', "matches", '`train = ["layers.*.input_layernorm"]`'),
    ('layers = ["4-5"]', "the model has no block `4-5`", "name existing blocks"),
    ('layers = ["0"], targets = ["layers.1"]', "no matrix of `targets` is in these blocks", "name others"),
    ("ranks = { mlp: 3, norm: 2 }", "`norm` matches no matrix", "as in `targets`"),
    ('targets = ["mlp"], alphas = { q_proj: 2 }', "`q_proj` matches no matrix", "as in `targets`"),
    ('targets = ["mlp", "layers.9"]', "matches `layers.9`", "the blocks are 0 to 3"),
    ("rank = 3, init = orthogonal", "rank 3 is odd", "use rank 4, or another init"),
    ("rank = 40, init = pissa", "k_proj of 32 × 64 has 32 singular values, and rank 40 takes more", "use rank 32"),
    ("targets = []", "no matrix has an adapter", "leave targets out"),
    ('train = ["layers.4"]', "is in `layers.4`", "the blocks are 0 to 3"),
    ('train = ["norms"]', "no parameter of the model is in `norms`", "did you mean `norm`?"),
])  # fmt: skip
def test_names_that_do_not_fit(compiled, settings, message, hint):
    (wrong,) = compiled(model=SHAPE, adapter=adapted(settings)).diagnostics.errors
    assert wrong.code == "X435" and message in wrong.message and wrong.hint is not None and hint in wrong.hint


def test_what_an_adapter_has_begun_with_is_kept(make_plan):
    """In the plan, in checkpoints and in memory, and not trained; and the model is the rest from there on."""
    plain, plan = (make_plan(model=SHAPE, adapter=adapted(f"{SOME}{each}")) for each in ("", ", init = pissa"))
    kept = [each for each in plan.parameters.tensors if each.begun]
    assert sum(each.size for each in kept) == plan.parameters.trained == plain.parameters.trained
    assert all(".lora_begun_" in each.name and not each.trained for each in kept) and len(kept) == 2 * (4 + 6)
    assert plan.parameters.total == plain.parameters.total + plain.parameters.trained
    saved = [checkpoint_contents(each) for each in (plain, plan)]
    assert (
        saved[1]["tensors"].keys() - saved[0]["tensors"].keys() == {each.name for each in kept} == {*saved[1]["frozen"]}
    )
    memory, before = (next(each.memory for each in one.estimates.classes) for one in (plan, plain))
    assert memory.parameters - before.parameters == 4 * plain.parameters.trained
    assert (memory.gradients, memory.optimizer) == (before.gradients, before.optimizer)
    assert plan.estimates.work.position == plain.estimates.work.position
    assert plan.estimates.checkpoint_bytes == plain.estimates.checkpoint_bytes + 4 * plain.parameters.trained
    assert plan.node("setup.decompose").args == plan.node("setup.residual").args == {"matrices": 10}
    order = [node.op for node in plan.nodes]
    assert order.index("setup.base") < order.index("setup.decompose") < order.index("setup.resume")
    assert order.index("setup.resume") < order.index("setup.residual") < order.index("setup.checkpoint")
    assert "setup.adapter" not in order and "singular values" in plan.node("setup.decompose").does
    (reason, *_) = resumable(plain, plan).reasons
    assert (reason.kind, reason.path) == ("incompatible", "adapter.init"), reason


def test_what_is_dropped_is_in_the_plan(make_plan):
    plan = make_plan(model=SHAPE, adapter=adapted('rank = 4, dropout = 0.05, targets = ["q_proj"]'))
    node = plan.node("setup.dropout")
    assert node.args == {"seed": 1, "share": 0.05, "matrices": 4}
    assert "drop 0.05 of the inputs of the adapters of 4 matrices, and divide the rest by 0.95" in node.does
    assert all(each.op != "setup.dropout" for each in make_plan(model=SHAPE, adapter=adapted("rank = 4")).nodes)


@pytest.mark.parametrize(
    ("target", "hint"),
    [("gate_proj", "write `experts.gate_proj`"),
        ("mlp.gate", 'the router can have no adapter; `train = ["layers.*.mlp.gate"]` trains it in full')],
)  # fmt: skip
def test_experts_and_routers_are_told_apart(compiled, target, hint):
    model = "model qwen3_moe { dim = 64, layers = 2, heads = 8, experts = 8, expert_ffn = 32 }"
    (wrong,) = compiled(model=model, adapter=adapted(f'targets = ["{target}"]')).diagnostics.errors
    assert wrong.code == "X435" and wrong.hint is not None and hint in wrong.hint


def test_other_settings_that_do_not_fit(compiled):
    frozen = SHAPE.replace("192 }", '192, frozen = ["embed_tokens"] }')
    (wrong,) = compiled(model=frozen, adapter=adapted("rank = 4")).diagnostics.errors
    assert wrong.code == "X435" and wrong.hint is not None and "`train`" in wrong.hint
    moving = "model qwen3_moe { dim = 64, layers = 2, heads = 8, experts = 8, router { bias_speed = 1e-3 } }"
    (wrong,) = compiled(model=moving, adapter=adapted("rank = 4")).diagnostics.errors
    assert wrong.code == "X435" and wrong.hint == "use bias_speed 0"


@pytest.mark.parametrize(("settings", "message", "hint"), [
    ('targets = ["mlp", "up_proj"]', "`up_proj` matches nothing", "remove `up_proj`"),
    ('layers = ["1-9"]', "`1-9` goes beyond the model, whose blocks are 0 to 3", "write `1-3`"),
    ('targets = ["layers.2-4.mlp"]', "`layers.2-4.mlp` goes beyond the model", "write `2-3`"),
    ('targets = ["mlp"], train = ["layers.0-9.self_attn"]', "`layers.0-9.self_attn` goes beyond", "write `0-3`"),
    ("rank = 33", "rank 33 is more than layers.0.self_attn.k_proj of 32 × 64 can have", "use rank 32 or less"),
    ("rank = 4, ranks = { mlp: 65 }", "rank 65 is more than layers.0.mlp.gate_proj of 192 × 64", "use rank 64"),
])  # fmt: skip
def test_what_an_adapter_says_in_vain(compiled, settings, message, hint):
    (idle,) = compiled(model=SHAPE, adapter=adapted(settings)).diagnostics.warnings
    assert idle.code == "W401" and message in idle.message and hint in idle.hint


LATENT = (
    "model glm4_moe_lite { dim = 64, layers = 2, heads = 4, experts = 4, ffn = 64, expert_ffn = 64, q_rank = 16, "
    "kv_rank = 16, nope_dim = 16, rope_dim = 16, value_dim = 16 }"
)
ROUTED = "model qwen3_moe { dim = 64, layers = 2, heads = 8, experts = 8 }"


@pytest.mark.parametrize(("model", "targets", "code"), [
    (LATENT, '"q_proj", "o_proj"', "W401"),  # its queries are q_a_proj and q_b_proj
    (LATENT, '"q_proj"', "X435"),
    (LATENT, '"o_prj", "q_a_proj"', "X435"),
    (ROUTED, '"gate_proj", "o_proj"', "X435"),  # experts have it
])  # fmt: skip
def test_usual_names_that_a_model_lacks(compiled, model, targets, code):
    found = compiled(model=model, adapter=adapted(f"targets = [{targets}]")).diagnostics
    assert [each.code for each in found.errors] == (["X435"] if code == "X435" else [])
    said = [each.code for each in found.warnings if "as in PEFT" in each.message]
    assert said == (["W401"] if code == "W401" else [])


def test_a_mistake_stands_where_it_was_written(compiled):
    """Of a list at the element, of a map at the name."""
    wrong = ('targets = ["mlp", "q_prj"]', 'layers = ["0", "7"]', 'train = ["norm", "norms"]', "ranks = { q_prj: 4 }")
    for settings in wrong:
        (error,) = compiled(model=SHAPE, adapter=adapted(settings)).diagnostics.errors
        assert error.span is not None and error.span.text.strip('"') in ("q_prj", "7", "norms")


def test_groups_are_not_held_against_an_adapter_that_does_not_fit(compiled):
    group = 'group "**.*lora_B" { lr_scale = 16 }'
    (wrong,) = compiled(model=SHAPE, adapter=adapted('targets = ["q_prj"]'), group=group).diagnostics.errors
    assert wrong.code == "X435"


def test_a_group_can_have_every_b(make_plan):
    model = "model qwen3_moe { dim = 64, layers = 2, heads = 8, experts = 8, expert_ffn = 32 }"
    blocks = {"adapter": adapted('rank = 4, targets = ["all_linear", "experts"]'), "batch": BATCH}
    plan = make_plan(model=model, group='group "**.*lora_B" { lr_scale = 16 }', **blocks)
    (group,) = (node for node in plan.nodes if node.op == "setup.group")
    assert group.does.startswith("14 tensors, ") and group.args["lr_scale"] == 16  # 4 and 3 matrices of two blocks
    whole = sum(each.size for each in plan.parameters.tensors if each.name.endswith(("lora_B", "lora_B.weight")))
    assert f", {whole / 1000:.1f}k parameters" in group.does


def test_a_matrix_is_trained_in_full_or_has_an_adapter(compiled, make_plan):
    beside = 'train = ["layers.0.self_attn"]'
    (wrong,) = compiled(model=SHAPE, adapter=adapted(beside)).diagnostics.errors
    assert wrong.code == "X435" and "layers.0.self_attn.q_proj in it has an adapter" in wrong.message
    for more in ('targets = ["mlp"]', 'layers = ["1-3"]'):
        assert make_plan(model=SHAPE, adapter=adapted(f"{more}, {beside}"))


def test_every_setting_makes_another_experiment(make_plan):
    settings = ("rank = 4, alpha = 8", "alpha = 2", "scaling = rslora", "init = gaussian", 'targets = ["mlp"]')
    more = (
        'targets = ["mlp", "q_proj"]', 'train = ["norm"]', "ranks = { mlp: 4 }", "alphas = { mlp: 4 }",
        'layers = ["0"]', "dora = true", "dropout = 0.1",
    )  # fmt: skip
    plans = [make_plan(model=SHAPE, adapter=adapted(each)) for each in ("rank = 16", *settings, *more)]
    assert len({plan.config_id for plan in plans}) == len({plan.id for plan in plans}) == len(plans)
    assert make_plan(model=SHAPE, adapter=adapted("rank = 16, alpha = 16")).config_id == plans[0].config_id


def test_a_state_fits_a_plan_with_the_same_adapter(make_plan):
    def contents(*settings):
        blocks = {"adapter": adapted(settings[0])} if settings else {}
        return checkpoint_contents(make_plan(model=SHAPE, **blocks))

    lora = contents("rank = 8")
    assert not mismatches(lora, contents("rank = 8, init = gaussian, dropout = 0.1")) and not mismatches(lora, lora)
    for other, path in (
        (contents("rank = 8, alpha = 9"), "adapter.alpha"),
        (contents("rank = 8, scaling = rslora"), "adapter.scaling"),
        (contents('rank = 8, targets = ["q_proj"]'), "adapter.targets"),
        (contents("rank = 4, alpha = 8"), "adapter.rank"),
        (contents("rank = 8, dora = true"), "adapter.dora"),
        (contents("rank = 8, ranks = { mlp: 4 }"), "adapter.ranks"),
        (contents("rank = 8, alphas = { mlp: 4 }"), "adapter.alphas"),
    ):
        (wrong,) = mismatches(lora, other)
        assert wrong.path == path
    for before, after, said in (
        (contents(), lora, "the checkpoint has no adapter"),
        (lora, contents(), "an adapter without"),
    ):
        (wrong,) = mismatches(before, after)
        assert wrong.path == "adapter" and said in wrong.text
    (wrong,) = mismatches(lora, contents('rank = 8, train = ["norm"]'))
    assert wrong.path == "adapter.train" and "norm.weight is not in the checkpoint" in wrong.text


LORA = adapted("rank = 4, alpha = 8")
QUERIES = adapted('rank = 4, targets = ["q_proj"]')
TOP = adapted('rank = 4, targets = ["layers.3"]')
LOW = adapted('rank = 4, targets = ["layers.0"]')
HIGH = adapted('rank = 4, targets = ["layers.2-3"], train = ["norm"]')
DORA = adapted("rank = 4, alpha = 8, dora = true")
DORA_EXPERTS = adapted('rank = 4, alpha = 8, dora = true, targets = ["experts", "o_proj"]')
DROPOUT = adapted("rank = 4, alpha = 8, dropout = 0.1")
DORA_DROPOUT = adapted("rank = 4, alpha = 8, dora = true, dropout = 0.1")
DORA_DROPOUT_EXPERTS = adapted('rank = 4, alpha = 8, dora = true, dropout = 0.1, targets = ["experts", "o_proj"]')
DROPOUT_EXPERTS = adapted('rank = 4, alpha = 8, dropout = 0.1, targets = ["experts", "o_proj"]')
PISSA = adapted("rank = 4, alpha = 8, init = pissa")
PISSA_EXPERTS = adapted('rank = 4, init = pissa, targets = ["experts", "o_proj"]')
EXPERTS = adapted('rank = 4, alpha = 8, targets = ["experts", "o_proj"]')
EXPERT_OUTPUTS = adapted('rank = 4, alpha = 8, targets = ["experts.down_proj"], layers = ["1"]')
LAST_OUTPUTS = adapted('rank = 4, targets = ["o_proj", "mlp.down_proj"], layers = ["1"]')
HEAD = 'adapter lora { rank = 4, alpha = 8, targets = ["all_linear", "lm_head"] }'
FEW = [
    (Topology(model="moe", note="outputs of experts of one block"), EXPERT_OUTPUTS),
    (Topology(tp=2, note="dora, dropout"), DORA_DROPOUT),
    (Topology(pp=2, sets=SCHEDULES["zero_bubble"], note="queries, zero_bubble"), QUERIES),
]
MORE = [
    (Topology(tp=2, note="dora"), DORA),
    (Topology(fsdp=2, ep=2, model="moe", note="experts"), EXPERTS),
    (Topology(fsdp=2, note="dropout"), DROPOUT),
    (Topology(fsdp=2, ep=2, model="moe", note="outputs of experts of one block"), EXPERT_OUTPUTS),
    (Topology(model="moe", sets=("activation.mode=full",), note="outputs of experts, full"), EXPERT_OUTPUTS),
    (Topology(sets=("activation.mode=selective",), note="outputs of one block, selective"), LAST_OUTPUTS),
    (Topology(fsdp=2, note="pissa"), PISSA),
    (Topology(fsdp=2, note="all"), LORA),
    (Topology(fsdp=2, sets=("activation.mode=full",), note="top, full recomputation"), TOP),
    (Topology(tp=2, note="all"), LORA),
    (Topology(pp=2, note="high"), HIGH),
    (Topology(pp=2, tp=2, note="dropout"), DROPOUT),
    (Topology(tp=2, sets=("parallel.tp.sequence=false",), note="all, without sequence"), LORA),
    (Topology(fsdp=2, shared=TIED, note="high, tied"), HIGH),
    (Topology(fsdp=2, sets=("activation.mode=full",), note="all, full recomputation"), LORA),
    (Topology(fsdp=2, sets=("activation.mode=selective",), note="all, selective recomputation"), LORA),
    (Topology(replicate=2, sets=("parallel.stack=ddp",), note="all, ddp"), LORA),
    (Topology(ring=2, note="all"), LORA),
    (Topology(fsdp=2, note="dora"), DORA),
    (Topology(tp=2, sets=("activation.mode=full",), note="dora, full recomputation"), DORA),
    (Topology(tp=2, sets=("activation.mode=selective",), note="dora, selective recomputation"), DORA),
    (Topology(tp=2, ep=2, model="moe", note="dora"), DORA),
    (Topology(fsdp=2, ep=2, model="moe", note="dora, experts"), DORA_EXPERTS),
    (Topology(tp=2, ep=2, model="moe", note="dora, experts"), DORA_EXPERTS),
    (Topology(tp=2, ep=2, model="moe", sets=("activation.mode=selective",), note="dora, experts, selective"),
        DORA_EXPERTS),
    (Topology(fsdp=2, ep=2, model="moe", note="dora, dropout, experts"), DORA_DROPOUT_EXPERTS),
    (Topology(tp=2, sets=("activation.mode=selective",), note="dora, dropout, selective"), DORA_DROPOUT),
    (Topology(ring=2, note="dropout"), DROPOUT),
    (Topology(tp=2, sets=("activation.mode=full",), note="dropout, full recomputation"), DROPOUT),
    (Topology(tp=2, sets=("activation.mode=selective",), note="dropout, selective recomputation"), DROPOUT),
    (Topology(tp=2, ep=2, model="moe", note="dropout"), DROPOUT),
    (Topology(fsdp=2, ep=2, model="moe", note="dropout, experts"), DROPOUT_EXPERTS),
    (Topology(tp=2, ep=2, model="moe", note="dropout, experts"), DROPOUT_EXPERTS),
    (Topology(fsdp=2, ep=2, model="moe", sets=("activation.mode=selective",), note="dropout, experts, selective"),
        DROPOUT_EXPERTS),
    (Topology(tp=2, fsdp=2, note="high"), HIGH),
    (Topology(tp=2, note="head"), HEAD),
    (Topology(fsdp=2, note="head"), HEAD),
    (Topology(tp=2, fsdp=2, sets=("parallel.tp.loss=false", "model.tie_embeddings=true"), note="head, tied"), HEAD),
    (Topology(pp=2, sets=("model.tie_embeddings=true",), note="head, tied"), HEAD),
    (Topology(pp=2, sets=SCHEDULES["zero_bubble"], note="head, zero_bubble"), HEAD),
    (Topology(replicate=2, sets=("parallel.stack=ddp",), note="head, ddp"), HEAD),
    (Topology(fsdp=2, sets=('adapter.targets=["layers.3.mlp", "lm_head"]',), note="head and last block"), HEAD),
    (Topology(tp=2, note="pissa"), PISSA),
    (Topology(pp=2, note="pissa"), PISSA),
    (Topology(replicate=2, sets=("parallel.stack=ddp",), note="pissa, ddp"), PISSA),
    (Topology(fsdp=2, sets=("activation.mode=full",), note="pissa, full recomputation"), PISSA),
    (Topology(fsdp=2, ep=2, model="moe", note="pissa, experts"), PISSA_EXPERTS),
    (Topology(tp=2, ep=2, model="moe", note="pissa, experts"), PISSA_EXPERTS),
    (Topology(pp=2, sets=ZBV, note="all, zbv"), LORA),
    (Topology(pp=2, sets=SCHEDULES["interleaved_1f1b"], note="all, interleaved_1f1b"), LORA),
    (Topology(pp=2, sets=SCHEDULES["zero_bubble"], note="all, zero_bubble"), LORA),
    (Topology(pp=2, sets=ZBV, note="queries, zbv"), QUERIES),
    (Topology(pp=2, sets=SCHEDULES["zero_bubble"], note="low, zero_bubble"), LOW),
    (Topology(pp=2, sets=(*SCHEDULES["zero_bubble"], "activation.mode=full"), note="queries, full"), QUERIES),
    (Topology(pp=2, sets=(*SCHEDULES["zero_bubble"], "activation.mode=full"), note="all, zero_bubble, full"), LORA),
    (Topology(pp=2, sets=(*SCHEDULES["zero_bubble"], "activation.mode=selective"), note="queries, selective"), QUERIES),
    (Topology(fsdp=2, ep=2, model="moe", note="all"), LORA),
    (Topology(fsdp=4, ep=2, model="moe", note="experts"), EXPERTS),
    (Topology(tp=2, ep=2, model="moe", note="experts"), EXPERTS),
]  # fmt: skip


@pytest.mark.parametrize(
    ("topology", "adapter", "shallow"),
    [*(pytest.param(*each, True, id=each[0].name, marks=() if each is FEW[1] else pytest.mark.matrix) for each in FEW),
        *(pytest.param(*each, False, id=f"{each[0].name}, deep", marks=pytest.mark.matrix) for each in FEW),
        *(pytest.param(*each, False, id=each[0].name, marks=pytest.mark.matrix) for each in MORE)],
)  # fmt: skip
def test_an_adapter_costs_what_the_plan_says(topology, adapter, shallow, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hold_against_the_trace(plan_of(tmp_path, topology, params="fp32", more=adapter, shallow=shallow))


def test_a_model_that_is_drawn_anew_under_an_adapter_is_the_same(make_plan):
    """A checkpoint has the adapter alone; where there is none, it has the model."""
    other = SHAPE.replace(" }", ", init_std = 0.1 }")
    (wrong,) = resumable(*(make_plan(model=each, adapter=adapted("rank = 4")) for each in (SHAPE, other))).reasons
    assert (wrong.kind, wrong.path) == ("incompatible", "model.init_std") and "0.02 → 0.1: the model" in wrong.text
    (allowed,) = resumable(*(make_plan(model=each) for each in (SHAPE, other))).reasons
    assert allowed.kind == "safe"
