"""Checkpoints of DeepSpeed's engine: what is put together of them, and that nothing in them is executed."""

import os
import sys
import types
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from xtrain.cli.main import main
from xtrain.runtime.base.errors import ExportFailed
from xtrain.runtime.store.deepspeed_import import ZeroFiles

SHAPES = [{"embed.weight": (5, 3), "layer.weight": (3, 3)}, {"norm.weight": (3,)}]
FROZEN = {"frozen.weight": (2, 3)}


@pytest.fixture
def stage_class(monkeypatch):
    """The class of DeepSpeed that its files name, whether it is installed or not."""
    name = "deepspeed.runtime.zero.config"
    for part in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.zero", name):
        monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
    kind = type("ZeroStageEnum", (int,), {"__module__": name, "__qualname__": "ZeroStageEnum"})
    sys.modules[name].ZeroStageEnum = kind
    return kind


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    named = {name: shape for group in (*SHAPES, FROZEN) for name, shape in group.items()}
    return {name: torch.randn(*shape, generator=generator) for name, shape in named.items()}


def write(folder: Path, stage_class: type, stage: int, ranks: int, more: object = None) -> Path:
    """As its engine writes them; more: something that a program of its own has put beside."""
    found = weights()
    tag = folder / "global_step7"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("global_step7")
    shapes = [OrderedDict((f"module.{name}", torch.Size(shape)) for name, shape in group.items()) for group in SHAPES]
    flat = [torch.cat([found[name].flatten() for name in group]) for group in SHAPES]
    for rank in range(ranks):
        if stage == 3:
            pieces = []
            for group in SHAPES:
                parts = []
                for name in group:
                    each = -(-found[name].numel() // ranks)
                    padded = torch.cat([found[name].flatten(), torch.zeros(each * ranks - found[name].numel())])
                    parts.append(padded[rank * each : (rank + 1) * each])
                pieces.append(torch.cat(parts))
        else:
            padded = [torch.cat([each, torch.zeros(-len(each) % (2 * ranks))]) for each in flat]
            pieces = [each.chunk(ranks)[rank].clone() for each in padded]
        key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        state = {"zero_stage": stage_class(stage), "partition_count": ranks if stage == 3 else [ranks] * 2, key: pieces}
        torch.save({"optimizer_state_dict": state}, tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        whole = found["frozen.weight"]
        fragment = whole.flatten().chunk(ranks)[rank].clone() if stage == 3 else whole
        model = {
            "module": OrderedDict({"module.bias": torch.ones(2), "module.count": torch.ones(1, dtype=torch.int64)}),
            "buffer_names": ["module.bias", "module.count"],
            "param_shapes": shapes,
            "frozen_param_shapes": {f"module.{name}": torch.Size(shape) for name, shape in FROZEN.items()},
            "frozen_param_fragments": {"module.frozen.weight": fragment},
            "shared_params": {},
            "client_state": more,
        }
        name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
        if stage == 3 or rank == 0:
            torch.save(model, tag / name)
    return folder


@pytest.mark.parametrize(("stage", "ranks"), [(1, 1), (2, 2), (2, 3), (3, 1), (3, 2), (3, 3)])
def test_pieces_are_put_together(tmp_path, stage_class, stage, ranks):
    files = ZeroFiles.open(write(tmp_path, stage_class, stage, ranks))
    expected = {**weights(), "bias": torch.ones(2)}
    assert (files.stage, files.ranks) == (stage, ranks) and files.shapes.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(files.whole(name), value), name
        assert files.dtype(name) == torch.float32


def test_the_folder_that_is_written(tmp_path, stage_class, capsys):
    write(tmp_path / "ds", stage_class, 2, 2)
    (tmp_path / "like").mkdir()
    for name in ("config.json", "tokenizer.json", "pytorch_model.bin"):
        (tmp_path / "like" / name).write_text("{}")
    sys.modules.pop("deepspeed.runtime.zero.config")
    arguments = ["checkpoint", "convert", str(tmp_path / "ds"), "--like", str(tmp_path / "like")]
    assert main([*arguments, "--to", str(tmp_path / "out"), "--shard-size", "100B"]) == 0
    there = sorted(each.name for each in (tmp_path / "out").iterdir())
    assert there[0] == "config.json" and there[-1] == "tokenizer.json" and "pytorch_model.bin" not in there
    found = {}
    for each in (tmp_path / "out").glob("*.safetensors"):
        found |= load_file(each)
    assert all(torch.equal(found[name], value) for name, value in weights().items())
    assert "ZeRO stage 2, 2 ranks, 5 weights" in capsys.readouterr().err
    assert main([*arguments, "--to", str(tmp_path / "out")]) == 3
    assert "already exists" in capsys.readouterr().err
    assert main([*arguments, "--to", str(tmp_path / "half"), "--dtype", "bf16"]) == 0
    assert load_file(tmp_path / "half" / "model.safetensors")["norm.weight"].dtype == torch.bfloat16


class Strikes:
    """What is executed by a plain pickle reader."""

    def __reduce__(self):
        return os.mkdir, ("struck",)


def test_nothing_is_executed_unless_it_is_trusted(tmp_path, stage_class, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "ds", stage_class, 2, 2, Strikes())
    arguments = ["checkpoint", "convert", "ds", "--to", "out"]
    assert main(arguments) == 3
    said = capsys.readouterr().err
    assert "posix.mkdir" in said and "--trust-pickle" in said
    assert not Path("struck").exists() and not Path("out").exists()
    assert main([*arguments, "--trust-pickle"]) == 0
    assert Path("struck").is_dir() and "warning: files are read as pickles" in capsys.readouterr().err


def test_what_cannot_be_put_together(tmp_path, stage_class):
    folder = write(tmp_path / "a", stage_class, 2, 3)
    (folder / "global_step7" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(ExportFailed, match="it has the files of 2 of 3 ranks"):
        ZeroFiles.open(folder)
    folder = write(tmp_path / "b", stage_class, 2, 2)
    (folder / "global_step7" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").write_bytes(b"half")
    with pytest.raises(ExportFailed, match="cannot be read"):
        ZeroFiles.open(folder)
    with pytest.raises(ExportFailed, match=r"holds no \*_model_states.pt"):
        ZeroFiles.open(tmp_path)
    (folder / "global_step7" / "layer_00-model_states.pt").touch()
    with pytest.raises(ExportFailed, match="layers of a pipeline"):
        ZeroFiles.open(folder)


def test_a_run_is_exported(tmp_path, capsys):
    (tmp_path / "plan.json").touch()
    assert main(["checkpoint", "convert", str(tmp_path), "--to", str(tmp_path / "out")]) == 2
    assert "use `xtrain export`" in capsys.readouterr().err
