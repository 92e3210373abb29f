"""Adapters of models that transformers' own code computes, against PEFT on the same base: gradients, files, merges."""

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_models import begun_with, plan_on, run_of
from code_models import LENGTHS, SINGLE, SIZES, built, loaded, rows, theirs
from code_models import make as make_code
from safetensors.torch import load_file
from small_runs import plan_of

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
DEFAULT = r"(?<=vector)\.default\.weight|\.default(?=\.)"  # in names of modules, not in those of files

pytestmark = pytest.mark.usefixtures("inspected_here")


def matrices(kind: str, base: Any) -> list[str]:
    """Names of matrices of layers, by their last part."""
    return SOME.get(kind) or sorted({
        name.rpartition(".")[2]
        for name, module in CodeModel(base).layers.named_modules()
        if type(module) is torch.nn.Linear
    })  # fmt: skip


def adapted(base: Any, targets: list[str], **more: Any) -> Any:
    """A model of PEFT with a random adapter."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(task_type="CAUSAL_LM", r=3, lora_alpha=5, target_modules=targets, **more)
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
        re.sub(DEFAULT, "", name): torch.zeros_like(each) if each.grad is None else each.grad
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
@pytest.mark.parametrize(("kind", "more"), [
    *((kind, {}) for kind in ("olmo3", *TYPES)),
    *((kind, {"use_dora": True}) for kind in ("olmo3", "phi3", "glm4_moe")),
])  # fmt: skip
def test_an_adapter_of_a_model_that_transformers_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, more: dict[str, Any]
):
    """Has the gradients of PEFT in fp64, is exported as PEFT wrote it, and merged as there."""
    base = make_code(kind, tmp_path / "base")
    reference = adapted(base, matrices(kind, base), **more)
    reference.save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=False)
    collate = SINGLE if kind == "mamba" else ""
    plan = plan_on(tmp_path, collate, CODE)
    directory = run_of(plan, tmp_path)
    assert main(["export", str(directory), "--adapter", "--to", str(tmp_path / "out")]) == 0
    for file in (PEFT_WEIGHTS, PEFT_CONFIG):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "adapter" / file).read_bytes()
    assert main(["merge", str(directory), "--to", str(tmp_path / "merged")]) == 0
    reference.double()
    with monkeypatch.context() as patched:  # norms of gemma2, which would round to fp32
        patched.setattr(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else x.to(torch.float32))
        assert gradients_apart(plan_on(tmp_path, collate, CODE, "fp64"), reference) < 1e-6
    reference.float().merge_and_unload().save_pretrained(tmp_path / "theirs")
    merged, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "theirs"))
    assert merged.keys() == theirs.keys()
    for key, tensor in merged.items():
        torch.testing.assert_close(tensor, theirs[key], rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["olmo3", *TYPES])
def test_peft_reads_an_adapter_that_began_here(tmp_path: Path, kind: str):
    """PEFT computes with it what the merged model computes."""
    from peft import PeftModel

    base = make_code(kind, tmp_path / "base")
    chosen = [each for each in matrices(kind, base) if each != "dt_proj"]  # whose adapter PEFT computes nothing with
    targets = ", ".join(f'"{each}"' for each in chosen)
    collate = SINGLE if kind == "mamba" else ""
    adapter = f"adapter lora {{ rank = 3, targets = [{targets}] }}\n{collate}"
    plan = plan_of(f'"{tmp_path / "base"}" {CODE}', more=adapter)
    trained = {each.name: torch.randn(each.shape) / 10 for each in plan.parameters.tensors if each.trained}
    directory = run_of(plan, tmp_path, trained)
    assert main(["export", str(directory), "--adapter", "--to", str(tmp_path / "out")]) == 0
    assert main(["merge", str(directory), "--to", str(tmp_path / "merged")]) == 0
    ids_BS = torch.arange(4, 16).view(2, 6)
    merged, _ = loaded(tmp_path / "merged", type(base))
    alone, wanted = (each.eval()(ids_BS, use_cache=False).logits for each in (base, merged))
    model = PeftModel.from_pretrained(base, str(tmp_path / "out")).eval()
    found = model(input_ids=ids_BS, use_cache=False).logits
    largest = float(wanted.abs().max())
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4 * largest)
    assert not torch.allclose(found, alone, atol=1e-2 * largest)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["olmo3", "glm4_moe"])
def test_an_adapter_on_nf4_has_the_gradients_of_peft_on_the_same_numbers(tmp_path: Path, kind: str):
    """PEFT's base has the numbers that the codes stand for, which are those of bitsandbytes (`test_quantised.py`)."""
    from peft import PeftModel

    base = make_code(kind, tmp_path / "base", **SIZES.get(kind, {}))
    targets = matrices(kind, base)
    adapted(deepcopy(base), targets).save_pretrained(str(tmp_path / "adapter"))
    base.double()
    plan = plan_on(tmp_path, "precision { base nf4 { block = 32 } }", CODE, "fp64")
    stored = {each.name: each for each in built(plan).quantised()}
    names = {ours: name for name, ours in CodeModel(base).names.items()}
    assert all(any(f".{each}." in name for name in stored) for each in targets)
    for name, each in stored.items():
        weight, beside = base.get_parameter(names[name]), each.matrix.beside(each.module)
        values = each.matrix.values(each.parameter, beside, torch.float64)
        assert weight.shape == values.shape and not torch.equal(weight, values)
        weight.data.copy_(values)
    peft = PeftModel.from_pretrained(base, str(tmp_path / "adapter"), is_trainable=True).double().eval()
    assert gradients_apart(plan, peft) < 1e-6
