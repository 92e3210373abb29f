"""Models with a head of rewards: what transformers makes of them, and folders that they begin with."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_models import CONFIGS, make
from safetensors.torch import load_file
from small_runs import drawn, make_run, save
from torch import Tensor

from xtrain.cli.main import main
from xtrain.components.collators.pack_torch import pack
from xtrain.dsl.schema.model import FAMILIES, expert_families
from xtrain.dsl.schema.setting import settings_of
from xtrain.plan.plan import Plan
from xtrain.plan.weight_files import read_weight_files
from xtrain.plan.weight_layout import assign
from xtrain.planner.load import plan_from_text
from xtrain.runtime.feed.microbatch import Sample, Samples
from xtrain.runtime.nn.batch import ModelBatch
from xtrain.runtime.nn.unit_losses import RewardTerm
from xtrain.runtime.sampling.trained_run import alone, whole_model
from xtrain.runtime.store.adapter_export import export_of
from xtrain.runtime.store.base_weights import BaseWeights
from xtrain.runtime.store.stored_weights import WeightReader

LATENT = "q_rank = 14, kv_rank = 12, nope_dim = 6, rope_dim = 4, value_dim = 8, first_dense = 1"
TEXTS = ("line 7 abc def", "a", "longer than the others, and cut nowhere")
ORDINARY = ("llama", "qwen3", "qwen3_moe")
WITH_REWARDS = [name for name in CONFIGS if (known := FAMILIES[name].config) is not None and known.classifier]


def rewards_of(plan: Plan, weights: dict[str, Tensor], texts: tuple[str, ...]) -> Tensor:
    """Those that xtrain gives texts, packed into one row."""
    model = whole_model(plan, alone(torch.device("cpu")))
    for name, parameter in model.named_parameters():
        parameter.data = weights[name].to(parameter.dtype)
    for name, buffer in model.named_buffers():
        buffer.data.copy_(weights[name])
    found: list[Tensor] = []

    def keep(given: Any) -> tuple[Tensor, dict[str, Tensor]]:
        found.append(given.reward_KU[0])
        return given.reward_KU[0], {}

    model.minimise(RewardTerm(keep))
    samples = []
    for text in texts:
        tokens = torch.tensor([256, *text.encode()])
        labels = torch.full_like(tokens, -100)
        labels[0] = 7
        samples.append(Sample(row=0, tokens=tokens, labels=labels, values={"reward": 0.0}))
    rows = pack(capacity=128, unit="sequence").function(Samples(num_rows=1, samples=tuple(samples)))
    with torch.no_grad():
        model.whole(None, ModelBatch.of(rows, torch.device("cpu")))
    return found[0]


def of_transformers(model: Any, texts: tuple[str, ...]) -> Tensor:
    """Padded at the end, with the id that its config names."""
    ids = [[256, *text.encode()] for text in texts]
    pad, longest = model.config.pad_token_id, max(map(len, ids))
    mask = torch.tensor([[1] * len(each) + [0] * (longest - len(each)) for each in ids])
    padded = torch.tensor([each + [pad] * (longest - len(each)) for each in ids])
    with torch.no_grad():
        return model(padded, attention_mask=mask).logits[:, 0]


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=() if each in ORDINARY else pytest.mark.matrix) for each in WITH_REWARDS]
)
def test_transformers_gives_the_same_rewards(tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture):
    """Of texts side by side in a row, those of a batch that is padded; and again from the folder."""
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging as messages

    experts = ", experts = 3, experts_per_token = 2, expert_ffn = 24" if family in expert_families() else ""
    known = settings_of(FAMILIES[family])
    width = 16 if "rotary_share" in known else 10
    heads = f"kv_heads = 1, head_dim = {width}" if "kv_rank" not in known else LATENT
    heads += ", attention_layers = [1]" if "attention_layers" in known else ""
    sizes = f"dim = 36, layers = 2, heads = 3, {heads}, ffn = 40, norm_eps = 1e-3{experts}"
    plan = spec_plan(f"{family} {{ {sizes}, rope_theta = 700 }}")
    directory = make_run(plan, tmp_path / "run", tmp_path)
    weights = {name: 0.2 * value for name, value in drawn(plan).items()}
    save(plan, directory, weights)
    to = tmp_path / "out"
    export_of(plan, directory, checkpoint=None, averaged=None, dtype=None, most=10**9).write(to, lambda *_: None)
    assert {"score.weight"} == {name for name in load_file(to / "model.safetensors") if not name.startswith("model.")}
    messages.enable_propagation()
    with caplog.at_level(logging.WARNING):
        loaded: Any = AutoModelForSequenceClassification.from_pretrained(
            to, output_loading_info=True, attn_implementation="eager"
        )
    messages.disable_propagation()
    warnings = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert [each.getMessage() for each in warnings if each.name.startswith("transformers")] == []
    model, info = loaded
    assert not any(info.values()) and model.config.num_labels == 1
    ours, theirs = rewards_of(plan, weights, TEXTS), of_transformers(model, TEXTS)
    assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()
    assert not (to / "generation_config.json").exists()

    again = spec_plan(f'"{to}"')
    assert not any(node.op == "setup.head" for node in again.nodes)
    read = {name: torch.zeros_like(value) for name, value in weights.items()}
    files = read_weight_files(str(to))
    with WeightReader(files, assign(again.architecture, files), lambda done: None) as reader:
        reader.read((name, value) for name, value in read.items() if reader.has(name))
    assert all(torch.equal(read[name], weights[name]) for name in weights)


def spec_plan(model: str, more: str = "") -> Plan:
    """A run that learns rewards of the lines of a file."""
    text = f"""experiment small {{ seed = 1, budget = 40 steps }}
model {model}
tokenizer bytes
dataset lines {{ source = jsonl("lines.jsonl"), values = {{ reward: "reward" }}, oversized = skip }}
batch {{ sequence = 128 }}
optimizer adamw {{ lr = 1e-3 }}
loss regression
{more}
"""
    compiled = plan_from_text(text, "small.xtrain")
    assert compiled.plan is not None, compiled.diagnostics.render()
    return compiled.plan


def test_a_language_model_gets_a_head(tmp_path: Path):
    """Tied or not, its own head is left; that of rewards is drawn, and the config says what became of it."""
    folder = tmp_path / "base"
    make("llama", "odd heads, tied", folder)
    plan = spec_plan(f'"{folder}"')
    node = plan.node("setup.head")
    assert node.args == {"seed": 1, "init_std": 0.2} and "36 numbers" in node.does
    names = [each.name for each in plan.parameters.tensors]
    assert names[-1] == "score.weight" and plan.parameters.tensors[-1].shape == (1, 36)
    assert plan.architecture.head == "reward" and not plan.architecture.tie_embeddings
    directory = make_run(plan, tmp_path / "run", tmp_path)
    save(plan, directory, drawn(plan))
    to = tmp_path / "out"
    export_of(plan, directory, checkpoint=None, averaged=None, dtype=None, most=10**9).write(to, lambda *_: None)
    config = json.loads((to / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert config["pad_token_id"] not in (None, config["eos_token_id"])


def test_an_adapter_trains_the_head_with_it(tmp_path: Path):
    """Of a language model: PEFT puts both on it and gives the rewards of the merged model, which are ours."""
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    make("qwen3", "wide heads, tied", tmp_path / "base")
    model = f'"{tmp_path / "base"}"'
    plan = spec_plan(model, "adapter lora { rank = 3, alpha = 6 }")
    trained = [each.name for each in plan.parameters.tensors if each.trained]
    assert [name for name in trained if "lora" not in name] == ["score.weight"]
    weights = {name: 0.3 * value for name, value in drawn(plan).items() if name in trained}
    directory = make_run(plan, tmp_path / "run", tmp_path)
    with BaseWeights.of(plan, tmp_path, torch.device("cpu")) as base:
        save(plan, directory, weights, base_content=base.digest)
    assert main(["export", str(directory), "--adapter", "--to", str(tmp_path / "adapter")]) == 0
    assert main(["merge", str(directory), "--to", str(tmp_path / "merged")]) == 0
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["task_type"] == "SEQ_CLS" and config["modules_to_save"] == ["score"]

    merged: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    theirs = of_transformers(merged, TEXTS)
    under: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1)
    under.config.pad_token_id = merged.config.pad_token_id
    adapted = of_transformers(PeftModel.from_pretrained(under, str(tmp_path / "adapter")), TEXTS)
    assert (adapted - theirs).abs().max() < 1e-5 * theirs.abs().max()

    whole = spec_plan(f'"{tmp_path / "merged"}"')
    read = {name: torch.zeros_like(value) for name, value in drawn(whole).items()}
    files = read_weight_files(str(tmp_path / "merged"))
    with WeightReader(files, assign(whole.architecture, files), lambda done: None) as reader:
        reader.read(read.items())
    assert torch.equal(read["score.weight"], weights["score.weight"])
    assert (rewards_of(whole, read, TEXTS) - theirs).abs().max() < 1e-5 * theirs.abs().max()

    again = spec_plan(model, f'adapter lora {{ from = "{tmp_path / "adapter"}" }}')
    assert [each.name for each in again.parameters.tensors if each.trained] == trained
