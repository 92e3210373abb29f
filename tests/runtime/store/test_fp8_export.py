"""Exports with matrices in fp8 with scales of blocks of 128 × 128."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_runs import LLAMA, drawn, make_run, plan_of, read, save
from torch import Tensor

from xtrain.cli.main import main
from xtrain.runtime.store.export_weights import in_blocks

# Widths that blocks divide, and keys and values of 64 rows, which they do not.
DENSE = "llama { dim = 128, layers = 2, heads = 4, kv_heads = 2, head_dim = 32, ffn = 256 }"
EXPERTS = "experts = 4, experts_per_token = 2, expert_ffn = 128"
MOE = f"qwen3_moe {{ dim = 128, layers = 2, heads = 4, kv_heads = 4, head_dim = 32, {EXPERTS} }}"
TIED = DENSE.replace(" }", ", tie_embeddings = true }")


def run_of(model: str, folder: Path, **settings: str) -> Path:
    plan = plan_of(model, **settings)
    directory = make_run(plan, folder / "run", folder)
    save(plan, directory, drawn(plan))
    return directory


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def plain_blocks(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """One block after the other."""
    codes, scales = (
        torch.empty_like(matrix, dtype=torch.float8_e4m3fn),
        torch.empty([each // 128 for each in matrix.shape]),
    )
    for row in range(len(scales)):
        for column in range(len(scales[0])):
            place = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
            largest = matrix[place].abs().max()
            factor = 448 / largest if largest > 0 else torch.tensor(1.0)
            codes[place] = (matrix[place] * factor).clamp(-448, 448).to(torch.float8_e4m3fn)
            scales[row, column] = 1 / factor
    return codes, scales


def test_blocks_are_those_of_transformers_bit_for_bit():
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    config = SimpleNamespace(weight_block_size=(128, 128), scale_fmt="float")
    theirs = Fp8Quantize(SimpleNamespace(quantization_config=config))
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        rows, columns = (128 * (1 + int(torch.randint(3, (), generator=generator))) for _ in range(2))
        matrix = torch.randn(rows, columns, generator=generator) * 10.0 ** (seed % 7 - 4)
        if seed % 5 == 0:
            matrix[:128, :128] = 0
        codes, scales = in_blocks(matrix)
        for wanted in (plain_blocks(matrix), tuple(theirs._quantize_one("a.weight", matrix).values())):
            assert torch.equal(codes.view(torch.uint8), wanted[0].view(torch.uint8))
            assert torch.equal(scales, wanted[1])


@pytest.mark.parametrize(
    "model", [DENSE, pytest.param(MOE, marks=pytest.mark.slow), pytest.param(TIED, marks=pytest.mark.slow)]
)
def test_a_folder_in_fp8_is_read_with_the_same_bits(model: str, tmp_path: Path):
    """By xtrain and by transformers, which multiplies codes by scales where there is no GPU."""
    from transformers import AutoModelForCausalLM

    directory, out = run_of(model, tmp_path), tmp_path / "out"
    assert main(["export", str(directory), "--to", str(tmp_path / "plain"), "--dtype", "fp32"]) == 0
    assert main(["export", str(directory), "--to", str(out), "--dtype", "fp8", "--shard-size", "100KB"]) == 0
    plain, found = stored(tmp_path / "plain"), stored(out)
    coded = {name: found[f"{name}_scale_inv"] for name in found if f"{name}_scale_inv" in found}
    assert found.keys() == plain.keys() | {f"{name}_scale_inv" for name in coded} and len(coded) >= 10
    divided = {
        name for name, each in plain.items() if each.ndim == 2 and not any(extent % 128 for extent in each.shape)
    }
    assert coded.keys() == {name for name in divided if "layers" in name and ".gate.weight" not in name}
    values = {}
    for name, value in plain.items():
        if name in coded:
            codes, scales = plain_blocks(value)
            assert torch.equal(found[name].view(torch.uint8), codes.view(torch.uint8))
            assert torch.equal(coded[name], scales)
            values[name] = codes.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        else:
            assert torch.equal(found[name], value.bfloat16())
            values[name] = value.bfloat16().float()
    again: Any = read(plan_of(f'"{out}" {{ }}'))
    theirs: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    loaded = dict(theirs.named_parameters())
    for name, value in values.items():
        if ".experts." not in name:
            assert torch.equal(again[name.removeprefix("model.")], value)
            assert torch.equal(loaded[name], value)


ADAPTED = {"more": "adapter lora { rank = 2 }"}


@pytest.mark.parametrize(("model", "settings", "arguments", "message"), [
    (LLAMA, {}, (), "divide no matrix"),
    (DENSE, ADAPTED, ("merge",), "without an adapter"),
    (DENSE, ADAPTED, ("export", "--adapter"), "for a whole model"),
    (DENSE, {"params": "fp32, qat { weights = int8 }"}, ("export", "--quantise"), "--quantise integers"),
])  # fmt: skip
def test_what_is_not_written_in_fp8_is_refused(
    model: str,
    settings: dict[str, str],
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    directory = run_of(model, tmp_path, **settings)
    verb, *flags = arguments or ("export",)
    assert main([verb, str(directory), "--to", str(tmp_path / "out"), "--dtype", "fp8", *flags]) in (2, 3)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
