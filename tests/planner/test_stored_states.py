"""Moments in another format than the parameters, and weights that are rounded at random, in a plan."""

import pytest

from xtrain.plan.checkpoints import checkpoint_contents, mismatches

MODEL = "model qwen3 { dim = 32, layers = 2, heads = 4, kv_heads = 2, ffn = 64, tie_embeddings = false }"
HALVES = "precision { params = bf16 }"


@pytest.mark.parametrize(("optimizer", "moments"), [("adamw", 2), ("lion", 1), ("sgd", 1)])
def test_moments_in_bf16_take_half_the_bytes(make_plan, optimizer: str, moments: int):
    block = f"optimizer {optimizer} {{ lr = 1e-3%s }}"
    plain, halved = (make_plan(model=MODEL, optimizer=block % more) for more in ("", ", states = bf16"))
    numbers = plain.parameters.total
    (before,), (after,) = plain.estimates.classes, halved.estimates.classes
    assert (before.memory.optimizer, after.memory.optimizer) == (4 * moments * numbers, 2 * moments * numbers)
    assert plain.estimates.checkpoint_bytes - halved.estimates.checkpoint_bytes == 2 * moments * numbers
    assert "states" not in plain.node("setup.optimizer").args
    assert halved.node("setup.optimizer").args["states"] == "bf16" and "in bf16" in halved.node("setup.optimizer").does
    (found,) = mismatches(checkpoint_contents(plain), checkpoint_contents(halved))
    assert found.path == "optimizer.kind" and f"{optimizer} with moments in bf16" in found.text


def test_what_the_parameters_are_in_already_is_no_other_plan(make_plan, compiled):
    plain, same = (
        make_plan(model=MODEL, precision=HALVES, optimizer=f"optimizer adamw {{ lr = 1e-3{more} }}")
        for more in ("", ", states = bf16")
    )
    assert plain.node("setup.optimizer") == same.node("setup.optimizer")
    warnings = compiled(model=MODEL, precision=HALVES, optimizer="optimizer adamw { lr = 1e-3, states = bf16 }")
    assert "states has no effect: parameters are in bf16 already" in warnings.diagnostics.render()


def test_rounding_at_random_is_in_the_plan(make_plan):
    block = "optimizer adamw {{ lr = 1e-3{more} }}"
    nearest, random = (
        make_plan(model=MODEL, precision=HALVES, optimizer=block.format(more=more))
        for more in ("", ", stochastic_rounding = true")
    )
    node = random.node("setup.optimizer")
    assert node.args["stochastic_rounding"] is True and "stochastically rounded weights" in node.does
    assert "stochastic_rounding" not in nearest.node("setup.optimizer").args
    assert random.config_id != nearest.config_id
    assert not mismatches(checkpoint_contents(nearest), checkpoint_contents(random))
