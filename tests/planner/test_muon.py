"""`optimizer muon` in a plan: which parameters it makes orthogonal, what it keeps of the others, and resuming."""

import pytest

from xtrain.plan.checkpoints import checkpoint_contents, mismatches

DENSE = "model qwen3 { dim = 32, layers = 2, heads = 4, kv_heads = 2, ffn = 64, tie_embeddings = false }"
EXPERTS = (
    "model qwen3_moe { dim = 32, layers = 2, heads = 4, kv_heads = 2, ffn = 64, experts = 4, experts_per_token = 2, "
    "expert_ffn = 16 }"
)
MUON = "optimizer muon {{ lr = 1e-3{more} }}"


def test_matrices_of_blocks_are_its_own(make_plan):
    plan = make_plan(model=DENSE, optimizer=MUON.format(more=""))
    args = plan.node("setup.optimizer").args
    assert [name.removeprefix("layers.*.") for name in args["matrices"]] == [f"{owner}.weight" for owner in (
        "mlp.down_proj", "mlp.gate_proj", "mlp.up_proj", "self_attn.k_proj", "self_attn.o_proj", "self_attn.q_proj",
        "self_attn.v_proj",
    )]  # fmt: skip
    blocks = sum(t.size for t in plan.parameters.tensors if t.name.startswith("layers.") and len(t.shape) > 1)
    others = plan.parameters.total - blocks
    assert plan.estimates.checkpoint_bytes == 4 * (2 * blocks + 3 * others)
    (only,) = plan.estimates.classes
    assert only.memory.optimizer == 4 * (blocks + 2 * others)
    flops = {(32, 64): 3, (32, 32): 2, (16, 32): 2}  # rows and columns of those of a block → how many there are
    each = {sides: 5 * (4 * min(sides) ** 2 * max(sides) + 2 * min(sides) ** 3) for sides in flops}
    assert only.optimizer_flops == 2 * sum(count * each[sides] for sides, count in flops.items())
    assert not [call for call in only.traffic if call.node == "step.optimizer"]


def test_heads_are_taken_by_themselves_where_asked(make_plan):
    plain, plan = (make_plan(model=DENSE, optimizer=MUON.format(more=more)) for more in ("", ", heads = true"))
    assert "heads" not in plain.node("setup.optimizer").args
    heads = plan.node("setup.optimizer").args["heads"]
    own = {name: found for name in ("q", "k", "v", "o") if (found := heads[f"layers.*.self_attn.{name}_proj.weight"])}
    assert own == {"q": [4, 0], "k": [2, 0], "v": [2, 0], "o": [4, 1]} and len(heads) == 4
    (before,), (after,) = plain.estimates.classes, plan.estimates.classes
    # Of a block 4 + 2 + 2 + 4 matrices of 8 x 32 in place of two of 32 x 32 and two of 16 x 32.
    whole = sum(5 * (4 * low**2 * 32 + 2 * low**3) for low in (32, 32, 16, 16))
    assert before.optimizer_flops - after.optimizer_flops == 2 * (whole - 12 * 5 * (4 * 8**2 * 32 + 2 * 8**3))


def test_routers_are_its_own_where_asked_and_a_state_without_them_does_not_fit(make_plan):
    plain, routers = (make_plan(model=EXPERTS, optimizer=MUON.format(more=more)) for more in ("", ", routers = true"))
    gate = "layers.*.mlp.gate.weight"
    assert {*routers.node("setup.optimizer").args["matrices"]} - {*plain.node("setup.optimizer").args["matrices"]} == {
        gate
    }
    (found,) = mismatches(checkpoint_contents(plain), checkpoint_contents(routers))
    assert found.path == "optimizer.kind" and "muon of 7 matrices → muon of 8 matrices" in found.text
    assert not mismatches(checkpoint_contents(plain), checkpoint_contents(plain))


@pytest.mark.parametrize(("optimizer", "code", "path"), [
    ("muon { lr = 1e-3, heads = true, neurons = 0.9 }", "X437", "optimizer.neurons"),
    ("muon { lr = 1e-3, iteration = polar_express, ns_coefficients = [3, -4, 2] }", "W4", "optimizer.ns_coefficients"),
    ("ademamix { lr = 1e-3, alpha = 0, beta3_warmup = 10 }", "W4", "optimizer.beta3_warmup"),
])  # fmt: skip
def test_settings_that_do_not_go_together(compiled, optimizer, code, path):
    found = compiled(model=DENSE, optimizer=f"optimizer {optimizer}").diagnostics
    (only,) = found
    assert only.code.startswith(code) and path.rpartition(".")[2] in only.message


def test_polar_express_has_its_coefficients_in_the_plan(make_plan):
    plan = make_plan(model=DENSE, optimizer=MUON.format(more=", iteration = polar_express, ns_steps = 9"))
    args = plan.node("setup.optimizer").args
    assert "ns_coefficients" not in args and len(args["series"]) == 9
    assert args["series"][0][0] == pytest.approx(8.28721201814563 / 1.01) and args["series"][8] == [1.875, -1.25, 0.375]
