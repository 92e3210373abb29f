"""Exports with matrices as integers: the numbers that training multiplies with, in the form of compressed-tensors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_runs import LLAMA, drawn, make_run, plan_of, save
from torch import Tensor

from xtrain.cli.main import main
from xtrain.runtime.base.errors import ExportFailed
from xtrain.runtime.nn.rounding import packed, weight_grid
from xtrain.runtime.store.adapter_export import export_of
from xtrain.runtime.store.export import Rounded, _integers

PHI3 = "phi3 { dim = 32, layers = 2, heads = 4, kv_heads = 2, ffn = 48 }"
ROWS = {
    "int4": (LLAMA, "weights = int4, group = 16", "fp32"),
    "int4, whole rows": (LLAMA, "weights = int4, group = row", "fp32"),
    "int8, and inputs": (LLAMA, "weights = int8, group = row, activations = int8", "fp32"),
    "int8, tied": (LLAMA.replace(" }", ", tie_embeddings = true }"), "weights = int8, group = 16", "fp32"),
    "several matrices in one tensor": (PHI3, "weights = int4, group = 8", "fp32"),
    "bf16, some left out": (LLAMA, 'weights = int8, group = 16, skip = ["down_proj", "layers.1.self_attn"]', "bf16"),
}

OF_WEIGHTS = {name: ROWS[name] for name in ("int4", "int4, whole rows", "int8, tied")}


def run_of(model: str, qat: str, params: str, folder: Path) -> Path:
    plan = plan_of(model, params=f"{params}, qat {{ {qat} }}")
    directory = make_run(plan, folder / "run", folder)
    save(plan, directory, drawn(plan))
    return directory


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def unpacked(words: Tensor, bits: int, width: int) -> Tensor:
    """The integers of compressed-tensors: the first in the lowest bits, offset by half of their range."""
    numbers = (words.long()[..., None] >> (bits * torch.arange(32 // bits))) & (2**bits - 1)
    return numbers.flatten(-2)[..., :width] - 2 ** (bits - 1)


@pytest.mark.parametrize(("model", "qat", "params"), ROWS.values(), ids=ROWS.keys())
def test_integers_times_scales_are_the_rounded_matrices(tmp_path: Path, model: str, qat: str, params: str):
    directory = run_of(model, qat, params, tmp_path)
    assert main(["export", str(directory), "--to", str(tmp_path / "plain")]) == 0
    assert main(["export", str(directory), "--to", str(tmp_path / "out"), "--quantise", "--shard-size", "20KB"]) == 0
    plain, found = stored(tmp_path / "plain"), stored(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    form = config.pop("quantization_config")
    assert config == json.loads((tmp_path / "plain" / "config.json").read_text())
    weights = form["config_groups"]["group_0"]["weights"]
    bits, group = weights["num_bits"], weights["group_size"]
    assert (form["config_groups"]["group_0"]["input_activations"] is None) == ("activations" not in qat)
    assert "lm_head" in form["ignore"]
    rounded = 0
    for name, weight in plain.items():
        stem = name.removesuffix("weight")
        if name in found and found[name].is_floating_point():
            assert torch.equal(found.pop(name), weight), name
            assert weight.ndim == 1 or stem.rstrip(".") in form["ignore"], name
            continue
        rounded += 1
        if bits == 4 or "activations" not in qat:
            assert found.pop(f"{stem}weight_shape").tolist() == list(weight.shape)
            integers = unpacked(found.pop(f"{stem}weight_packed"), bits, weight.shape[1])
        else:
            integers = found.pop(name)
        scale = found.pop(f"{stem}weight_scale")
        grid = weight_grid(weight.unflatten(-1, (-1, group or weight.shape[1])), bits)
        assert torch.equal(scale, grid.scale.squeeze(-1).to(weight.dtype)) and scale.dtype == weight.dtype
        groups = weight.unflatten(-1, (-1, group or weight.shape[1]))
        assert torch.equal((integers.view_as(groups) * grid.scale).to(weight.dtype), grid.values(groups.clone())), name
    assert rounded and not found


@pytest.mark.parametrize(("bits", "group", "inputs", "form", "strategy"), [
    (4, 16, False, "pack-quantized", "group"), (8, None, False, "pack-quantized", "channel"),
    (8, None, True, "int-quantized", "channel"), (4, 16, True, "pack-quantized", "group"),
])  # fmt: skip
def test_the_config_is_that_of_compressed_tensors(bits: int, group: int | None, inputs: bool, form: str, strategy: str):
    tokens = {"num_bits": 8, "type": "int", "symmetric": False, "dynamic": True, "strategy": "token"}
    assert _integers(Rounded(names=frozenset(), bits=bits, group=group, inputs=inputs), ()) == {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": bits, "type": "int", "symmetric": True, "dynamic": False, "strategy": strategy,
                    "group_size": group,
                },
                "format": form,
                "input_activations": tokens if inputs else None,
            }
        },
        "ignore": ["lm_head"],
    }  # fmt: skip


def test_integers_share_words():
    integers = torch.tensor([[-8, -7, 0, 7, 1, 2, 3, 4, -1]], dtype=torch.int8)
    assert [f"{word & 0xFFFFFFFF:08x}" for word in packed(integers, 4)[0].tolist()] == ["cba9f810", "00000007"]


def test_a_run_that_rounds_nothing_has_no_integers(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    plan = plan_of()
    directory = make_run(plan, tmp_path / "run", tmp_path)
    save(plan, directory, drawn(plan))
    assert main(["export", str(directory), "--to", str(tmp_path / "out"), "--quantise"]) == 3
    assert "X525" in (said := capsys.readouterr().err) and "rounds no matrices" in said
    assert main(["export", str(directory), "--to", str(tmp_path / "out"), "--quantise", "--adapter"]) == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_integer_stands_for_a_number_that_is_not_finite(tmp_path: Path, value: float):
    plan = plan_of(params="fp32, qat { weights = int4, group = 16 }")
    weights = drawn(plan)
    weights["layers.0.mlp.up_proj.weight"][3, 5] = value
    directory = make_run(plan, tmp_path / "run", tmp_path)
    save(plan, directory, weights)
    export = export_of(plan, directory, checkpoint=None, averaged=None, dtype=None, most=10**9, quantise=True)
    with pytest.raises(ExportFailed, match=r"up_proj.*in the checkpoint"):
        export.write(tmp_path / "out", lambda *progress: None)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("model", "qat", "params"), [*OF_WEIGHTS.values()], ids=[*OF_WEIGHTS])
def test_transformers_computes_with_the_rounded_matrices(tmp_path: Path, model: str, qat: str, params: str):
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    directory = run_of(model, qat, params, tmp_path)
    for name, more in (("plain", []), ("out", ["--quantise"])):
        assert main(["export", str(directory), "--to", str(tmp_path / name), *more]) == 0
    plain, theirs = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32) for name in ("plain", "out")
    )
    form: Any = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["config_groups"]
    weights = form["group_0"]["weights"]
    with torch.no_grad():
        for name, module in plain.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                groups = module.weight.unflatten(-1, (-1, weights["group_size"] or module.weight.shape[1]))
                grid = weight_grid(groups, weights["num_bits"])
                module.weight.copy_(grid.values(groups.clone()).flatten(1))
        tokens = torch.tensor([[256, *b"line 7"]])
        assert torch.equal(plain(tokens).logits, theirs(tokens).logits)
