"""Modules that predict further tokens in folders: as DeepSeek-V3 stores them, read again, and never lost unsaid."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_runs import drawn, make_run, plan_of, read, save

from xtrain.plan.plan import Plan
from xtrain.planner.load import plan_from_text
from xtrain.runtime.store.adapter_export import export_of
from xtrain.runtime.store.export import Exported

SIZES = (
    "dim = 32, layers = 2, heads = 4, q_rank = 20, kv_rank = 16, nope_dim = 6, rope_dim = 4, value_dim = 8, ffn = 48, "
    "experts = 4, experts_per_token = 2, expert_ffn = 24, first_dense = 1, expert_groups = 1, groups_per_token = 1"
)
DEEPSEEK = f"deepseek_v3 {{ {SIZES}, mtp = 2 }}"
# Names of the published model.safetensors.index.json, of its layer 61, without those of the block.
PUBLISHED = {
    "embed_tokens.weight", "enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight",
    "shared_head.head.weight", "input_layernorm.weight", "self_attn.q_a_proj.weight", "mlp.gate.weight",
    "mlp.gate.e_score_correction_bias", "mlp.experts.0.gate_proj.weight", "mlp.shared_experts.up_proj.weight",
}  # fmt: skip


def exported(plan: Plan, tensors: dict[str, torch.Tensor], folder: Path) -> Exported:
    directory = make_run(plan, folder / "run", folder)
    save(plan, directory, tensors)
    found = export_of(plan, directory, checkpoint=None, averaged=None, dtype=None, most=10**9)
    return found.write(folder / "out", lambda *progress: None)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, torch.Tensor], Path, Exported]:
    folder = tmp_path_factory.mktemp("further")
    plan = plan_of(DEEPSEEK)
    tensors = drawn(plan)
    return tensors, folder / "out", exported(plan, tensors, folder)


def test_names_are_those_of_the_published_model(made):
    tensors, folder, found = made
    stored = load_file(folder / "model.safetensors")
    assert not found.remarks and json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 2
    for layer in (2, 3):
        inside = {name.removeprefix(f"model.layers.{layer}.") for name in stored if f"layers.{layer}." in name}
        assert inside > PUBLISHED and not [name for name in inside if name.startswith(("join", "norm"))]
        assert torch.equal(
            stored[f"model.layers.{layer}.eh_proj.weight"], tensors[f"layers.{layer}.join.eh_proj.weight"]
        )
        assert torch.equal(
            stored[f"model.layers.{layer}.shared_head.norm.weight"], tensors[f"layers.{layer}.norm.weight"]
        )
        assert torch.equal(stored[f"model.layers.{layer}.embed_tokens.weight"], tensors["embed_tokens.weight"])
        assert torch.equal(stored[f"model.layers.{layer}.shared_head.head.weight"], tensors["lm_head.weight"])


def test_transformers_reads_the_model_itself(made):
    from transformers import AutoModelForCausalLM

    tensors, folder, _ = made
    model, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not found["missing_keys"] and not found["mismatched_keys"]
    assert {name.split(".layers.")[-1][:2] for name in found["unexpected_keys"]} == {"2.", "3."}
    assert model.config.num_hidden_layers == 2 and torch.equal(model.lm_head.weight, tensors["lm_head.weight"])


@pytest.mark.parametrize("modules", [0, 1, 2])
def test_a_folder_is_read_with_as_many_modules_as_are_wanted(made, modules: int):
    tensors, folder, _ = made
    plan = plan_of(f'"{folder}" {{ mtp = {modules} }}' if modules else f'"{folder}"')
    assert (plan.architecture.layers, plan.architecture.mtp) == (2 + modules, modules)
    found = read(plan)
    assert {name for name in found if ".join." in name} == {
        f"layers.{2 + n}.join.{each}.weight" for n in range(modules) for each in ("enorm", "hnorm", "eh_proj")
    }
    assert all(torch.equal(value, tensors[name]) for name, value in found.items())


def test_modules_that_a_folder_does_not_have_are_an_error(made):
    _, folder, _ = made
    text = f"""experiment small {{ seed = 1, budget = 4 steps }}
model "{folder}" {{ mtp = 3 }}
tokenizer bytes
dataset lines {{ source = text("*.txt") }}
batch {{ sequence = 64 }}
optimizer adamw {{ lr = 1e-3 }}
"""
    (error,) = plan_from_text(text, "small.xtrain").diagnostics.errors
    assert error.code == "X524" and "`model.layers.4.enorm.weight`" in error.message and "missing" in error.message


def test_what_is_not_written_is_said(made, tmp_path: Path):
    plan = plan_of("llama { dim = 32, layers = 2, heads = 4, ffn = 48, mtp = 1 }")
    (remark,) = exported(plan, drawn(plan), tmp_path).remarks
    assert remark.startswith("1 module that predicts further tokens stays in the checkpoint: files of llama")
    assert not [name for name in load_file(tmp_path / "out" / "model.safetensors") if "layers.2" in name]
    # Of a folder with modules that the run has not read neither they nor their number is written.
    shutil.copytree(made[1], tmp_path / "base")
    plan = plan_of(f'"{tmp_path / "base"}"')
    (tmp_path / "other").mkdir()
    (remark,) = exported(plan, drawn(plan), tmp_path / "other").remarks
    assert "has 2 layers that predict further tokens, and the run read none" in remark
    assert json.loads((tmp_path / "other" / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 0
