"""Specs in recipes/: as their table says, without a warning, and within the memory of their machines."""

import pytest

from recipes import COMMIT, RECIPES, REPOSITORIES, ROOT, main, planned, published_folders
from xtrain.plan.views import headroom

FEW = ("deepseek_v3_sft_256xh100", "qwen3_4b_grpo_8xh100", "qwen3_8b_lora_24gb")


def test_texts():
    written = {path.stem: path.read_text() for path in (ROOT / "recipes").glob("*.xtrain")}
    assert written == {recipe.name: recipe.text() for recipe in RECIPES}
    assert len(written) >= 40


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe.name in FEW], ids=lambda recipe: recipe.name)
def test_a_plan(recipe):
    with published_folders():
        found = planned(recipe)
    assert found.plan is not None and not found.diagnostics, found.diagnostics.render()
    assert headroom(found.plan).verdict == "fits"
    named = f'hub("{REPOSITORIES[recipe.model]}", revision = "{COMMIT}")'
    assert found.plan.node("setup.tokenizer").args["source"] == named


def _small(recipe):
    marks = [] if recipe.name == "qwen3_8b_lora_24gb" else [pytest.mark.slow]
    return pytest.param(recipe, id=recipe.name, marks=marks)


@pytest.mark.parametrize("recipe", [_small(recipe) for recipe in RECIPES])
def test_a_plan_from_weights(recipe):
    """A small model of the same type: its weights, tokenizer and template are read as those of the published one."""
    with published_folders({recipe.model, *(["Qwen3-8B"] if recipe.kind == "distill" else [])}):
        found = planned(recipe, drawn=False)
    assert found.plan is not None, found.diagnostics.render()
    assert not list(found.diagnostics.errors)


@pytest.mark.slow
def test_all_plans_and_their_page():
    main(write=False)
