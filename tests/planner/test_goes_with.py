"""Kinds that parts of the user go with: declared in the decorator, read from its text, checked in every spec."""

from pathlib import Path

import pytest

from xtrain.planner.load import plan_from_path

PARTS = """
from xtrain import {kind}

@{kind}({first}goes_with={goes})
def own({inputs}):
    {body}
"""
SPEC = """
use "parts.py"
experiment own {{ seed = 1, budget = 4 steps }}
model qwen3 {{ dim = 32, layers = 1, heads = 2, ffn = 32 }}
tokenizer bytes
dataset made {{ source = {source} }}
batch {{ sequence = 32, rows = 2 }}
{more}
"""
ADAMW = "optimizer adamw { lr = 1e-3 }\n"
# Kind of part → further arguments of its decorator, parameters, body, source of the spec, and lines that name it.
WRITTEN = {
    "loss": ("", "logprob_T", "return -logprob_T", "synthetic()", ADAMW + "loss own"),
    "hook": ('"after_step", ', "context", "pass", "synthetic()", ADAMW + "hook own"),
    "step": ("", "context", "pass", "synthetic()", ADAMW + "step own"),
    "train": ("", "context", "pass", "synthetic()", ADAMW + "train own"),
    "action": ("", "context", "pass", "synthetic()", ADAMW + "every 2 steps own"),
    "source": ("", "", "yield 'text'", "own()", ADAMW),
    "schedule": ("", "step, total", "return 1.0", "synthetic()", ADAMW + "scheduler own"),
    "optimizer": ("", "groups, lr", "return None", "synthetic()", "optimizer own { lr = 1e-3 }"),
}


def codes(folder: Path, kind: str, goes: str) -> list[str]:
    first, inputs, body, source, more = WRITTEN[kind]
    (folder / "parts.py").write_text(PARTS.format(kind=kind, first=first, goes=goes, inputs=inputs, body=body))
    (folder / "own.xtrain").write_text(SPEC.format(source=source, more=more))
    return [error.code for error in plan_from_path(folder / "own.xtrain", ()).diagnostics.errors]


@pytest.mark.parametrize("kind", WRITTEN)
def test_a_part_stands_only_next_to_what_it_goes_with(tmp_path: Path, kind: str):
    assert codes(tmp_path, kind, '{"model": ["llama", "qwen3"], "stack": "parallel", "adapter": "none"}') == []
    assert codes(tmp_path, kind, '{"model": "llama"}') == ["X450"]
    assert codes(tmp_path, kind, '{"stack": ["ddp"], "adapter": ["lora"]}') == ["X450", "X450"]


@pytest.mark.parametrize(
    "goes", ['{"optimiser": "adamw"}', '{"optimizer": 3}', '"adamw"', '{"optimizer": []}', "KINDS"]
)
def test_a_declaration_that_cannot_be_read_is_said(tmp_path: Path, goes: str):
    assert "X223" in codes(tmp_path, "loss", goes)


FAMILY = """
from torch.nn.functional import linear
from xtrain import AttentionLayer, Residual, family, layer, optimizer, weight

@layer(goes_with={"optimizer": "muon"})
def mine(x, up=weight("dim", "dim")):
    return linear(x, up)

@layer(goes_with={"optimizer": "muon"})
def unused(x, up=weight("dim", "dim")):
    return linear(x, up)

@family(goes_with={"stack": "parallel"})
def block(arch):
    return Residual.of(AttentionLayer("self_attn"), mine("mlp"))

@optimizer(goes_with={"adapter": "lora"})
def slow(groups, lr):
    return None
"""


def test_layers_of_a_family_and_optimizers_of_groups_are_checked(tmp_path: Path):
    (tmp_path / "parts.py").write_text(FAMILY)
    more = ADAMW + "group norm { optimizer slow { lr = 1e-3 } }"
    text = SPEC.format(source="synthetic()", more=more).replace("model qwen3 { dim = 32, ", "model block { dim = 32, ")
    (tmp_path / "own.xtrain").write_text(text)
    errors = plan_from_path(tmp_path / "own.xtrain", ()).diagnostics.errors
    assert [error.message for error in errors if error.code == "X450"] == [
        "mine goes with optimizer muon, and this spec has adamw",
        "slow goes with adapter lora, and this spec has none",
    ]


@pytest.mark.parametrize(
    ("goes", "hint"),
    [
        ('{"optimizer": ["muon", "adamww"]}', "did you mean `adamw`?"),
        ('{"stack": "paralel"}', "did you mean `parallel`?"),
        ('{"adapter": "lora"}', "choose adapter lora, or another function"),
    ],
)
def test_a_misspelt_kind_is_said(tmp_path: Path, goes: str, hint: str):
    codes(tmp_path, "loss", goes)
    (error,) = plan_from_path(tmp_path / "own.xtrain", ()).diagnostics.errors
    assert error.hint == hint
