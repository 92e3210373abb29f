"""Models that the modeling files of their own folder compute: executed where a spec says so, and nowhere else."""

import json
import shutil
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from code_models import built, inspected, rows, theirs
from small_runs import SPEC, make_run, plan_of, read, save

from xtrain.cli.main import main
from xtrain.dsl.checking import model_code
from xtrain.lsp.analysis import Analysis, all_corrections
from xtrain.planner.load import plan_from_text
from xtrain.runtime.base.ops import PlanMismatch
from xtrain.runtime.store.adapter_export import export_of

CONFIGURATION = """
from transformers import PretrainedConfig


class TinyConfig(PretrainedConfig):
    model_type = "tiny_remote"

    def __init__(self, vocab_size=260, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, **others):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        super().__init__(**others)
"""
MODELING = """
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_tiny import TinyConfig
from .norms import Scale

(Path(__file__).parent / "executed").touch()


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.is_causal = config, True
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.out = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x):
        heads = self.config.num_attention_heads
        q, k, v = (y.unflatten(-1, (heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        return self.out(attend(self, q, k, v, None)[0].flatten(-2))


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm, self.attention = Scale(config.hidden_size), Attention(config)
        self.up_proj, self.down_proj = nn.Linear(config.hidden_size, 64), nn.Linear(64, config.hidden_size)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down_proj(torch.relu(self.up_proj(x)))


class TinyForCausalLM(PreTrainedModel):
    config_class = TinyConfig
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config):
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.tokens

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids=None, inputs_embeds=None, **others):
        x = self.tokens(input_ids) if inputs_embeds is None else inputs_embeds
        for block in self.blocks:
            x = block(x)
        return CausalLMOutput(logits=self.head(x))
"""
NORMS = """
import torch
from torch import nn


class Scale(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
"""
INSPECTED = model_code._inspected
NAMES = {"AutoConfig": "configuration_tiny.TinyConfig", "AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with modeling files, which mark that they were executed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "model"
    folder.mkdir()
    monkeypatch.setattr(model_code, "_inspected", inspected)
    for name, text in (("configuration_tiny", CONFIGURATION), ("modeling_tiny", MODELING), ("norms", NORMS)):
        (folder / f"{name}.py").write_text(text)
    (folder / "config.json").write_text(json.dumps({"model_type": "tiny_remote", "auto_map": NAMES}))
    return folder


def errors(folder: Path, settings: str) -> list[tuple[str, str]]:
    text = SPEC.format(model=f'"{folder}" {{ {settings} }}', tokenizer="bytes", params="fp32", more="")
    found = plan_from_text(text, "small.xtrain").diagnostics
    return [(each.code, f"{each.message}; {each.hint}") for each in found.errors]


def edit(folder: Path, name: str, before: str, after: str) -> None:
    path = folder / name
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))


def test_modeling_files_are_executed_only_where_the_spec_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """In a process of their own, and files that changed since the plan are refused before they are executed."""
    monkeypatch.setattr(model_code, "_inspected", INSPECTED)
    for settings in ("weights = none", "weights = none, code = transformers"):
        ((code, text),) = errors(folder, settings)
        assert code == "X529" and "is not run" in text and "code = remote" in text
    assert not (folder / "executed").exists()
    plan = plan_of(f'"{folder}" {{ code = remote, weights = none }}')
    assert (folder / "executed").exists() and not list(folder.rglob("__pycache__"))
    build = plan.node("setup.build_model")
    assert len(build.args["code"]) == 16 and build.args["code"] in build.does and str(folder) in build.does
    (folder / "executed").unlink()
    edit(folder, "norms.py", "1e-6", "1e-5")  # which another file imports
    with pytest.raises(PlanMismatch, match="other modeling files than when the plan was made"):
        built(plan)
    assert not (folder / "executed").exists()
    monkeypatch.setattr(model_code, "_inspected", inspected)  # what follows needs no process of its own
    ((code, text),) = errors(folder, "weights = none, code = remote, vocab = tokenizer")  # reads the config again
    assert code == "X530" and "`vocab = tokenizer`" in text
    again = plan_of(f'"{folder}" {{ code = remote, weights = none }}')
    assert again.config_id != plan.config_id
    (folder / "README.md").write_text("no code")
    assert plan_of(f'"{folder}" {{ code = remote, weights = none }}').id == again.id


WAYS = (
    (', code = "remote"', ()),
    (", code = chosen", ()),
    (", code = transformers", ("model.code=remote",)),
    ("", ('model.code="remote"',)),
    ("", ("model.code=chosen",)),
)


def test_every_way_of_choosing_the_files(folder: Path):
    for written, sets in WAYS:
        model = f'"{folder}" {{ weights = none{written} }}'
        text = SPEC.format(model=model, tokenizer="bytes", params="fp32", more="")
        compiled = plan_from_text(f'param chosen = "remote"\n{text}', "small.xtrain", sets)
        assert compiled.plan is not None, (written, sets, compiled.diagnostics.render())
        assert "remote" in compiled.plan.architecture.own["code"]


@pytest.mark.parametrize("words", [
    ["check"], ["check", "--fix", "--diff"], ["check", "--fix"], ["schema"], ["diff", "a.xtrain"], ["lsp"],
], ids=" ".join)  # fmt: skip
def test_commands_that_execute_nothing(words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(model_code, "_inspected", INSPECTED)
    monkeypatch.chdir(folder.parent)
    text = SPEC.format(model='"model" { code = remote, weights = none }', tokenizer="bytes", params="fp32", more="")
    text = text.replace("optimizer adamw { lr", "optimizer adamw { weight_deacy = 0, lr")
    assert "weight_deacy" in text
    Path("a.xtrain").write_text(text)
    if words == ["lsp"]:
        analysis = Analysis.of("a.xtrain", {})
        assert all_corrections(analysis) is not None and analysis.plan() is None
    else:
        main([*words, "a.xtrain"])
    assert not (folder / "executed").exists()


def test_losses_and_exports_are_those_of_the_files(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "files_alone", package := ModuleType("files_alone"))
    package.__path__ = [str(folder)]
    model: Any = import_module("files_alone.modeling_tiny").TinyForCausalLM(
        import_module("files_alone.configuration_tiny").TinyConfig()
    )
    with torch.no_grad():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "tiny_remote", "auto_map": NAMES}))
    plan = plan_of(f'"{folder}" {{ code = remote }}', params="fp64")
    code = plan.architecture.own["code"]
    assert code["tensor"] and code["packs"] and code["spread"] and code["caches"] == "kernels" and code["stages"]
    ours, batch = built(plan).whole, rows(260)
    torch.testing.assert_close(ours(None, batch).sum(), theirs(model.double().eval(), batch), rtol=1e-9, atol=0)
    save(plan, make_run(plan, tmp_path / "run", tmp_path), read(plan))
    export_of(plan, tmp_path / "run", checkpoint=None, averaged=None, dtype=None, most=10**9).write(
        tmp_path / "out", lambda *_: None
    )
    from transformers import AutoModelForCausalLM

    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True, dtype=torch.float64)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize(("file", "before", "after", "reason"), [
    ("config.json", '"AutoModelForCausalLM"', '"AutoModel"', "names no modeling file"),
    ("config.json", "modeling_tiny.", "modeling_other.", "is no class of a file"),
    ("config.json", "modeling_tiny.", "someone/else--modeling_tiny.", "is no class of a file"),
    ("modeling_tiny.py", "class Layer", "clas Layer", "cannot be executed: SyntaxError"),
    ("modeling_tiny.py", "from torch import nn", "import nothing_such", "No module named"),
    ("modeling_tiny.py", "class TinyForCausalLM", "class Other", "has no attribute"),
    ("modeling_tiny.py", "self.post_init()", "raise ValueError('no such size')", "no such size"),
])  # fmt: skip
def test_files_that_cannot_be_used(folder: Path, file: str, before: str, after: str, reason: str):
    edit(folder, file, before, after)
    ((code, text),) = errors(folder, "weights = none, code = remote")
    assert code == "X529" and reason in text, text


def test_a_reference_has_the_same_files(folder: Path):
    other = folder.parent / "other"
    shutil.copytree(folder, other)
    text = f"""experiment small {{ budget = 4 steps }}
    model "{folder}" {{ code = remote, weights = none }}
    tokenizer bytes
    dataset pairs {{ source = jsonl("*.jsonl"), chosen = "chosen", rejected = "rejected" }}
    loss dpo {{ reference = "{other}" }}
    batch {{ sequence = 64 }}
    optimizer adamw {{ lr = 1e-3 }}
    """
    edit(other, "modeling_tiny.py", "relu", "tanh")
    (other / "executed").unlink(missing_ok=True)
    messages = [each.message for each in plan_from_text(text, "small.xtrain").diagnostics.errors]
    assert len(messages) == 1 and "other modeling files" in messages[0] and not (other / "executed").exists()
