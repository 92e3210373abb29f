"""Small teachers: folders of models with random weights, and what `xtrain data teach` stores of them."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from model_folders import CONFIG, shapes
from safetensors.torch import load_file, save_file

from xtrain.cli.data import teach
from xtrain.cli.verb import Refused
from xtrain.plan.plan import Plan


def make_teacher(folder: Path, vocab: int, *, seed: int = 5, deviation: float = 0.5, **changed: Any) -> Path:
    """A llama of `model_folders` whose logits are far from even. changed: keys of its config.json."""
    config = {**CONFIG, "vocab_size": vocab, "torch_dtype": "float32", **changed}
    draw = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=draw) * deviation
        for name, shape in shapes(config).items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def make_scorer(folder: Path, vocab: int) -> Path:
    """A llama with random weights that gives rewards."""
    make_teacher(folder, vocab, seed=6)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    tensors = load_file(folder / "model.safetensors")
    tensors["score.weight"] = tensors.pop("lm_head.weight")[:1].contiguous()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def taught(plan: Plan, folder: Path) -> int:
    """`xtrain data teach` of a plan, with `folder` as working folder; its exit status."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        return teach(plan, argparse.Namespace(dataset=None, json=True))
    except Refused as refusal:
        return refusal.code
    finally:
        os.chdir(before)


def make_sparse_teacher(folder: Path, vocab: int, *, seed: int = 5) -> Path:
    """A qwen3_moe of transformers, with four experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=vocab, hidden_size=24, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
        initializer_range=0.5, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
    )  # fmt: skip
    torch.manual_seed(seed)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder
