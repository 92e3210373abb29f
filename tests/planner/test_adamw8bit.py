"""`optimizer adamw8bit` in a plan: which moments are in 8 bits, what they take, and blocks that ranks would cut."""

import pytest

from xtrain.plan.checkpoints import checkpoint_contents, mismatches

MODEL = "model qwen3 { dim = 128, layers = 2, heads = 4, kv_heads = 2, ffn = 192, vocab = 300, tie_embeddings = false }"
BLOCK = "optimizer adamw8bit {{ lr = 1e-3{more} }}"


def test_matrices_have_codes_and_scales_and_vectors_have_not(make_plan):
    plan = make_plan(model=MODEL, optimizer=BLOCK.format(more=""))
    args = plan.node("setup.optimizer").args
    assert [name.removeprefix("layers.*.") for name in args["quantised"]] == [
        "embed_tokens.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", "self_attn.k_proj.weight",
        "self_attn.o_proj.weight", "self_attn.q_proj.weight", "self_attn.v_proj.weight", "lm_head.weight",
    ]  # fmt: skip
    coded = sum(
        t.size for t in plan.parameters.tensors if len(t.shape) > 1 and "down_proj" not in t.name  # rows of 192
    )  # fmt: skip
    others = plan.parameters.total - coded
    (only,) = plan.estimates.classes
    assert only.memory.optimizer == 2 * (coded + 4 * coded // 128) + 8 * others
    assert plan.estimates.checkpoint_bytes == 4 * plan.parameters.total + only.memory.optimizer


def test_a_state_in_other_blocks_does_not_fit(make_plan):
    one, other = (make_plan(model=MODEL, optimizer=BLOCK.format(more=more)) for more in ("", ", block = 64"))
    (found,) = mismatches(checkpoint_contents(one), checkpoint_contents(other))
    assert "8 matrices in blocks of 128 → adamw8bit of 9 matrices in blocks of 64" in found.text


@pytest.mark.parametrize(("tp", "block", "fitting"), [(2, 128, 32), (4, 64, 16), (4, 16, None)])
def test_a_block_lies_on_one_rank(compiled, tp: int, block: int, fitting: int | None):
    """Rows of down_proj have 192 numbers, those of o_proj 128."""

    def plan_of(block: int):
        optimizer = BLOCK.format(more=f", block = {block}")
        heads = MODEL.replace("kv_heads = 2", "kv_heads = 4")
        return compiled(model=heads, parallel=f"parallel {{ tp {tp} }}", optimizer=optimizer)

    if fitting is None:
        assert plan_of(block).plan is not None
        return
    (error,) = plan_of(block).diagnostics.errors
    assert (error.code, error.hint) == ("X437", f"use block {fitting}")
    assert f"have 128 numbers, of which a rank has {128 // tp}" in error.message
