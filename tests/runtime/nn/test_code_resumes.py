"""Runs of models that transformers' own code computes: what an edited config.json, folder or package means for them."""

import json
from pathlib import Path
from typing import Any

import pytest
from code_models import built, make, plan_for
from reference_models import make as make_native
from small_runs import plan_of

from xtrain.dsl.checking import inspections, model_code
from xtrain.plan.checkpoints import checkpoint_contents, mismatches, origin_contents, weight_mismatches
from xtrain.planner.load import plan_from_text
from xtrain.runtime.base.ops import PlanMismatch
from xtrain.runtime.nn import code_transformer

CACHE = inspections._cache

pytestmark = pytest.mark.usefixtures("inspected_here")


def edit(folder: Path, **keys: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


@pytest.mark.parametrize(("keys", "reason"), [
    ({"transformers_version": "9", "use_cache": True, "dtype": "bfloat16", "architectures": None, "return_dict": False,
      "output_hidden_states": True, "output_attentions": True, "eos_token_id": 9}, ""),
    ({"rms_norm_eps": 0.001}, "model.code rms_norm_eps 1e-05 → 0.001: the same weights would give other results"),
    pytest.param({"pad_token_id": 7}, "model.code pad_token_id 1 → 7: the same weights would give other results",
        marks=pytest.mark.matrix),
    pytest.param({"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 9.0}}},
        "model.code rope_parameters full_attention rope_theta 500000 → 9, sliding_attention rope_theta 500000, "
        "rope_type default → none: the same weights would give other results", marks=pytest.mark.matrix),
])  # fmt: skip
def test_a_run_resumes_after_edits_of_metadata_alone(keys: dict[str, Any], reason: str, tmp_path: Path):
    theta = {"rope_type": "default", "rope_theta": 500000.0}
    kinds = {"rope_parameters": {"full_attention": theta, "sliding_attention": theta}}
    make("olmo3", tmp_path, **(kinds if "rope_parameters" in keys else {}))
    before = plan_for(tmp_path)
    edit(tmp_path, **keys)
    after = plan_for(tmp_path)
    assert (before.config_id == after.config_id) == (not reason)
    found = mismatches(checkpoint_contents(before), checkpoint_contents(after))
    assert [str(each) for each in found] == ([reason] if reason else [])


@pytest.mark.parametrize(("keys", "same"), [
    ({"transformers_version": "9", "use_cache": False, "torch_dtype": "bfloat16"}, True),
    ({"rms_norm_eps": 0.001}, False),
    ({"rope_parameters": {"rope_theta": 99.0, "rope_type": "default"}}, False),
])  # fmt: skip
def test_a_native_model_is_the_same_after_edits_of_metadata(keys: dict[str, Any], same: bool, tmp_path: Path):
    make_native("llama", "plain", tmp_path)
    server = f'experiment s {{ }}\nmodel "{tmp_path}" {{ }}\ntokenizer bytes\nadapter lora {{ }}\nserve {{ }}\n'

    def plans() -> list[Any]:
        return [plan_of(f'"{tmp_path}" {{ }}'), plan_from_text(server, "served.xtrain").plan]

    before = plans()
    edit(tmp_path, **keys)
    assert [one.config_id == two.config_id for one, two in zip(before, plans(), strict=True)] == [same] * 2


def test_a_run_starts_from_the_weights_of_another(tmp_path: Path):
    make("olmo3", tmp_path)
    saved = checkpoint_contents(plan_for(tmp_path))
    for more in ("", "adapter lora { rank = 2 }"):
        assert not weight_mismatches(saved, origin_contents(plan_for(tmp_path, more=more), saved))


@pytest.mark.parametrize(("keys", "reason"), [
    ({"use_cache": True}, ""),
    ({"rms_norm_eps": 0.001}, "`rms_norm_eps` in the config.json"),
    pytest.param({"model_type": "qwen2"}, "`model_type` in the config.json", marks=pytest.mark.matrix),
    ({"rope_scaling": "nonsense"}, "rejects the config"),
])  # fmt: skip
def test_a_reference_is_computed_by_the_same_code(keys: dict[str, Any], reason: str, tmp_path: Path):
    """Of a type that there is a native family for."""
    make_native("llama", "odd heads, tied", tmp_path / "own")
    make_native("llama", "odd heads, tied", tmp_path / "other")
    edit(tmp_path / "other", **keys)
    text = f"""experiment small {{ budget = 4 steps }}
    model "{tmp_path}/own" {{ code = transformers }}
    tokenizer bytes
    dataset pairs {{ source = jsonl("*.jsonl"), chosen = "chosen", rejected = "rejected" }}
    loss dpo {{ reference = "{tmp_path}/other" }}
    batch {{ sequence = 64 }}
    optimizer adamw {{ lr = 1e-3 }}
    """
    found = [each.message for each in plan_from_text(text, "small.xtrain").diagnostics.errors]
    assert len(found) == bool(reason) and all(reason in each for each in found), found


def test_a_description_is_made_again_if_its_file_is_damaged_or_the_code_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also where the package has the same version. A plan made before is then refused when it runs."""
    source = tmp_path / "modeling_own.py"
    source.write_text("first")
    made: list[str] = []

    def inspected(config: str, versions: Any, remote: str = "") -> dict[str, Any]:
        made.append(config)
        return {"source": str(source), "digest": model_code.source_digest(str(source)), "dim": 64}

    def described() -> Any:
        model_code._described.cache_clear()
        return model_code.describe({"model_type": "own"})

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(inspections, "_cache", CACHE)
    monkeypatch.setattr(model_code, "_inspected", inspected)
    first = described()
    assert described() == first and len(made) == 1 and "source" not in first
    (path,) = (tmp_path / "cache").glob("xtrain/models/*")
    text = path.read_text()
    for damaged in ("", "[]", "{}", "null", text[:-3], text.replace("64", "65"), text.partition("\n")[2]):
        path.write_text(damaged)
        assert described() == first and path.read_text() == text
    count = len(made)
    source.write_text("second")
    assert described()["digest"] != first["digest"] and described() and len(made) == count + 1


def test_a_plan_runs_with_the_code_that_it_was_made_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make("olmo3", tmp_path)
    plan = plan_for(tmp_path)
    monkeypatch.setattr(code_transformer, "code_digest", lambda cls: "other")
    with pytest.raises(PlanMismatch, match=r"other code of Olmo3ForCausalLM than when the plan was made; plan again"):
        built(plan)
