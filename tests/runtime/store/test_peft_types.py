"""Adapters of models that transformers' own code computes, against PEFT on the same base: gradients, files, merges."""

from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_models import begun_with, plan_on, run_of
from code_models import LENGTHS, SINGLE, built, rows, theirs
from code_models import make as make_code
from safetensors.torch import load_file

from xtrain.cli.main import main
from xtrain.plan.peft import PEFT_CONFIG, PEFT_WEIGHTS, assign_peft
from xtrain.plan.plan import Plan
from xtrain.runtime.nn.model_code import CodeModel
from xtrain.runtime.store.beginning import planned_adapter

TYPES = (
    "arcee", "apertus", "gemma2", "cohere", "cohere2", "ernie4_5", "exaone4", "glm", "glm4", "glm4_moe", "gpt_neox",
    "granitemoe", "helium", "mamba", "mistral", "phi", "phi3", "seed_oss", "starcoder2", "biogpt",
)  # fmt: skip
# PEFT refuses the last matrix of a Mamba mixer, and takes the names of matrices of shared experts for stacks.
SOME = {"mamba": ["dt_proj", "in_proj", "x_proj"], "glm4_moe": ["o_proj", "q_proj"]}
CODE = "{ code = transformers }"

pytestmark = pytest.mark.usefixtures("inspected_here")


def matrices(kind: str, base: Any) -> list[str]:
    """Names of matrices of layers, by their last part."""
    return SOME.get(kind) or sorted({
        name.rpartition(".")[2]
        for name, module in CodeModel(base).layers.named_modules()
        if type(module) is torch.nn.Linear
    })  # fmt: skip


def adapted(base: Any, targets: list[str]) -> Any:
    """A model of PEFT with random A and B."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(task_type="CAUSAL_LM", r=3, lora_alpha=5, target_modules=targets)
    model: Any = get_peft_model(base, config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0.0, 0.1)
    return model.eval()


def gradients_apart(plan: Plan, peft: Any) -> float:
    """The largest difference of the gradients of an adapter, relative to the largest; both models begin with it."""
    model, begun = built(plan), begun_with(plan)
    own = {name: each for name, each in model.named_parameters() if name in begun}
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(begun[name])
    batch = rows(plan.architecture.vocab, LENGTHS if plan.architecture.own["code"]["packs"] else LENGTHS[:1])
    loss = theirs(peft, batch)
    loss.backward()
    ours = model.whole(None, batch)
    ours.sum().backward()
    assert float(ours.sum().detach()) == pytest.approx(float(loss.detach()), rel=1e-6)
    files = planned_adapter(plan, **plan.node("setup.read_adapter").args).files
    trained = tuple(each for each in plan.parameters.tensors if each.trained)
    # A matrix that is not called as a module, such as the last of a Mamba mixer, leaves its adapter without gradient.
    its = {
        name.replace(".default.", "."): torch.zeros_like(each) if each.grad is None else each.grad
        for name, each in peft.named_parameters()
        if each.requires_grad
    }
    parts = {name: stored for name, (stored,) in assign_peft(plan.architecture, trained, files).parts.items()}
    assert {each.name for each in parts.values()} == its.keys()
    largest = max(float(each.abs().max()) for each in its.values())
    found = {name: own[name].grad for name in parts}
    gaps = (float((each - its[parts[name].name]).abs().max()) for name, each in found.items() if each is not None)
    return max(gaps) / largest


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["olmo3", *TYPES])
def test_an_adapter_of_a_model_that_transformers_computes(tmp_path: Path, kind: str):
    """Has the gradients of PEFT in fp64, is exported as PEFT wrote it, and merged as there."""
    base = make_code(kind, tmp_path / "base")
    reference = adapted(base, matrices(kind, base))
    reference.save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=False)
    collate = SINGLE if kind == "mamba" else ""
    plan = plan_on(tmp_path, collate, CODE)
    directory = run_of(plan, tmp_path)
    assert main(["export", str(directory), "--adapter", "--to", str(tmp_path / "out")]) == 0
    for file in (PEFT_WEIGHTS, PEFT_CONFIG):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "adapter" / file).read_bytes()
    assert main(["merge", str(directory), "--to", str(tmp_path / "merged")]) == 0
    assert gradients_apart(plan_on(tmp_path, collate, CODE, "fp64"), reference.double()) < 1e-6
    reference.float().merge_and_unload().save_pretrained(tmp_path / "theirs")
    merged, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "theirs"))
    assert merged.keys() == theirs.keys()
    for key, tensor in merged.items():
        torch.testing.assert_close(tensor, theirs[key], rtol=0, atol=1e-6)
