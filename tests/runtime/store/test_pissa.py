"""`init = pissa` against PEFT: the same first values, the same rest of the model; and what is exported and merged."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_models import its_factors, with_single_experts
from reference_models import make
from safetensors.torch import load_file
from small_runs import make_run, plan_of, read, save
from torch import Tensor

from xtrain.blocks.adapted import adapted_matrices
from xtrain.cli.main import main
from xtrain.plan.peft import PEFT_CONFIG, PEFT_WEIGHTS
from xtrain.plan.plan import Plan
from xtrain.runtime.base.ops import PlanMismatch
from xtrain.runtime.nn.adapters import begun_part, decomposed
from xtrain.runtime.store.base_weights import BaseWeights, take_out

EXPERTS = r".*\.(experts\.\d+\.(gate|up|down)_proj|o_proj)"
# Family, its model, settings of the adapter, and PEFT's.
CASES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("llama", "odd heads, tied",
        'rank = 4, alpha = 3, targets = ["q_proj", "o_proj", "down_proj"], ranks = { q_proj: 2 }',
        {"r": 4, "lora_alpha": 3, "target_modules": ["q_proj", "o_proj", "down_proj"], "rank_pattern": {"q_proj": 2}}),
    ("qwen3", "plain", "rank = 3, alpha = 5, scaling = rslora",
        {"r": 3, "lora_alpha": 5, "use_rslora": True, "target_modules": "all-linear"}),
    ("qwen3_moe", "plain", 'rank = 2, alpha = 6, targets = ["experts", "o_proj"]',
        {"r": 2, "lora_alpha": 6, "target_modules": EXPERTS}),
]  # fmt: skip


def adapted(folder: Path, settings: str, more: str = "") -> Plan:
    return plan_of(f'"{folder}"', more=f"adapter lora {{ init = pissa, {settings} }}\n{more}")


def first(plan: Plan) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the adapter begins with; and the rest of the matrices that it is of."""
    weights, values, rest = read(plan), {}, {}
    for layer, matrix in adapted_matrices(plan.architecture):
        start = f"layers.{layer}."
        name = f"{start}{matrix.name}"
        found = decomposed(matrix, weights[name], torch.float32)
        values |= {f"{start}{each}": value for each, value in found.items()}
        rest[name] = weights[name] - begun_part(matrix, found)
    return values, rest


@pytest.mark.parametrize(("family", "name", "settings", "theirs"), CASES, ids=[f"{c[0]}, {c[1]}" for c in CASES])
def test_first_values_are_those_of_peft(tmp_path: Path, family: str, name: str, settings: str, theirs: dict[str, Any]):
    """But for the signs of singular vectors, which nothing says there."""
    from peft import LoraConfig, get_peft_model

    reference = make(family, name, tmp_path / "base")
    if "experts" in settings:
        reference = with_single_experts(reference)
    peft: Any = get_peft_model(reference, LoraConfig(init_lora_weights="pissa", **theirs))
    values, rest = first(adapted(tmp_path / "base", settings))
    its = dict(peft.named_parameters())
    ours = {
        other: each for name, value in values.items() if "begun" not in name for other, each in its_factors(name, value)
    }
    assert ours.keys() == {name for name in its if "lora_" in name}
    for name, a in ours.items():
        if "lora_A" in name:
            sign_R = (a * its[name]).sum(1).sign()
            torch.testing.assert_close(a * sign_R[:, None], its[name], rtol=0, atol=1e-5)
            b_name = name.replace("lora_A", "lora_B")
            torch.testing.assert_close(ours[b_name] * sign_R, its[b_name], rtol=0, atol=1e-5)
    for name, value in rest.items():
        pairs = (
            [(name, value)]
            if value.dim() == 2
            else [
                (f"{name.rpartition('.')[0]}.{expert}.{name.rpartition('.')[2]}.weight", each.t())
                for expert, each in enumerate(value)
            ]
        )
        for other, each in pairs:
            its_rest = its[f"base_model.model.model.{other.removesuffix('.weight')}.base_layer.weight"]
            torch.testing.assert_close(each, its_rest, rtol=0, atol=1e-6)
    for name, value in values.items():
        if "begun" in name:
            assert torch.equal(value, values[name.replace("begun_", "")])


def test_a_node_that_means_other_matrices_is_not_executed(tmp_path: Path):
    make("llama", "odd heads, tied", tmp_path / "base")
    plan = adapted(tmp_path / "base", 'rank = 2, targets = ["q_proj"]')
    planned = plan.node("setup.residual").args["matrices"]
    part: Any = None  # nothing is looked at before
    with pytest.raises(PlanMismatch, match=f"{planned} matrices, and the node says {planned + 1}"):
        take_out(plan, part, part, matrices=planned + 1)


def test_matrices_of_experts_are_read_one_by_one(tmp_path: Path):
    """Of a folder no stack is ever in memory: the largest that is read is one matrix."""
    make("qwen3_moe", "plain", tmp_path / "base")
    plan = adapted(tmp_path / "base", 'rank = 2, targets = ["experts"]')
    name = "layers.1.mlp.experts.up_proj"
    with BaseWeights.of(plan, tmp_path, torch.device("cpu")) as base:
        whole, read = base.whole(name), base.experts(name)
        for number, matrix in enumerate(whole):
            own = read(number)
            assert torch.equal(own, matrix) and own.untyped_storage().nbytes() == 4 * matrix.numel()


def run_of(plan: Plan, folder: Path, values: dict[str, Tensor]) -> Path:
    """A run with a checkpoint of these values."""
    directory = make_run(plan, folder / "run", folder)
    with BaseWeights.of(plan, folder, torch.device("cpu")) as base:
        save(plan, directory, values, base_content=base.digest)
    return directory


@pytest.mark.parametrize(
    ("family", "name", "settings", "theirs"), CASES[:2], ids=[f"{c[0]}, {c[1]}" for c in CASES[:2]]
)
def test_what_is_exported_and_merged_is_what_peft_converts(
    tmp_path: Path, family: str, name: str, settings: str, theirs: dict[str, Any]
):
    """PEFT writes a changed adapter for the whole model, of twice the rank, from what it has saved at first."""
    from peft import LoraConfig, get_peft_model

    peft: Any = get_peft_model(
        make(family, name, tmp_path / "base"), LoraConfig(task_type="CAUSAL_LM", init_lora_weights="pissa", **theirs)
    )
    peft.peft_config["default"].init_lora_weights = True  # as PEFT's guide has it
    peft.save_pretrained(str(tmp_path / "first"))
    its = {each: parameter for each, parameter in peft.named_parameters() if parameter.requires_grad}
    begun = {each: parameter.detach().clone() for each, parameter in its.items()}
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in its.values():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    peft.save_pretrained(str(tmp_path / "theirs"), path_initial_model_for_weight_conversion=str(tmp_path / "first"))

    plan = adapted(tmp_path / "base", settings)
    values: dict[str, Tensor] = {}
    for each in plan.parameters.tensors:
        if each.adapter:
            ((other, _),) = its_factors(each.name.replace("begun_", ""), torch.empty(0))
            values[each.name] = begun[other] if each.begun else its[other].detach()
    directory = run_of(plan, tmp_path, values)
    assert main(["export", str(directory), "--adapter", "--to", str(tmp_path / "ours")]) == 0
    ours, expected = (load_file(tmp_path / each / PEFT_WEIGHTS) for each in ("ours", "theirs"))
    assert ours.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in ours.items())
    mine, wanted = (json.loads((tmp_path / each / PEFT_CONFIG).read_text()) for each in ("ours", "theirs"))
    assert all(mine[key] == pytest.approx(wanted[key]) for key in ("r", "lora_alpha", "use_rslora"))
    assert mine["rank_pattern"] == wanted["rank_pattern"]

    assert main(["merge", str(directory), "--to", str(tmp_path / "merged")]) == 0
    merged, whole = load_file(tmp_path / "merged" / "model.safetensors"), peft.merge_and_unload().state_dict()
    for each, value in merged.items():
        torch.testing.assert_close(value, whole[each], rtol=0, atol=1e-6)
    assert main(["generate", str(directory), "--prompt", "a", "--tokens", "1"]) == 0
