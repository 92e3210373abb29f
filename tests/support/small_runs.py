"""Run directories with a checkpoint, made in this process without a run."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xtrain.plan.architecture import buffers
from xtrain.plan.checkpoints import checkpoint_contents
from xtrain.plan.plan import Plan
from xtrain.plan.serialise import to_json
from xtrain.planner.load import plan_from_text
from xtrain.runtime.base.mesh import CollectiveErrors
from xtrain.runtime.nn.build import DTYPES
from xtrain.runtime.store.beginning import planned_files
from xtrain.runtime.store.checkpoints import CheckpointFolder, Publisher, partial_of
from xtrain.runtime.store.stored_weights import WeightReader
from xtrain.runtime.store.writing import Backend, write_tensors

SPEC = """experiment small {{ seed = 1, budget = 40 steps }}
model {model}
tokenizer {tokenizer}
dataset lines {{ source = text("*.txt") }}
batch {{ sequence = 64 }}
optimizer adamw {{ lr = 1e-3 }}
precision {{ params = {params} }}
{more}
"""
LLAMA = "llama { dim = 32, layers = 2, heads = 4, kv_heads = 2, ffn = 48 }"
MIXTRAL = "mixtral { dim = 32, layers = 2, heads = 4, kv_heads = 2, ffn = 48, experts = 3, expert_ffn = 24 }"


def plan_of(model: str = LLAMA, *, tokenizer: str = "bytes", params: str = "fp32", more: str = "") -> Plan:
    text = SPEC.format(model=model, tokenizer=tokenizer, params=params, more=more)
    compiled = plan_from_text(text, "small.xtrain")
    assert compiled.plan is not None, compiled.diagnostics.render()
    return compiled.plan


def drawn(plan: Plan, seed: int = 0) -> dict[str, Tensor]:
    """Random weights by parameter, and biases of routers."""
    generator = torch.Generator().manual_seed(seed)
    type = DTYPES[plan.node("setup.build_model").args["params"]]
    found = {each.name: torch.randn(each.shape, generator=generator).to(type) for each in plan.parameters.tensors}
    return found | {each.name: torch.randn(each.shape, generator=generator) for each in buffers(plan.architecture)}


def read(plan: Plan) -> dict[str, Tensor]:
    """The weights of the folder or snapshot that a plan begins with."""
    found = drawn(plan)
    files = planned_files(**plan.node("setup.read_weights").args)
    with WeightReader.of(plan, files, report=lambda done: None) as reader:
        reader.read((name, each) for name, each in found.items() if reader.has(name))
    return found


def make_run(plan: Plan, directory: Path, base: Path) -> Path:
    """A run that was started in the folder `base`, without a checkpoint."""
    (directory / "metadata").mkdir(parents=True)
    (directory / "plan.json").write_text(json.dumps(to_json(plan)))
    (directory / "metadata" / "environment.json").write_text(json.dumps({"folder": str(base)}))
    return directory


def save(
    plan: Plan,
    directory: Path,
    trained: dict[str, Tensor],
    *,
    step: int = 20,
    averages: dict[str, Tensor] | None = None,
    alone: bool = False,
    backend: Backend = "dcp",
    **state: Any,
) -> Path:
    """A checkpoint. averages: of `ema`; alone: weights alone."""
    folder = CheckpointFolder(directory / "checkpoints")
    final = folder.model_path(step) if alone else folder.path(step)
    publisher = Publisher(folder)
    tensors = {f"model.{name}": value for name, value in trained.items()}
    tensors |= {f"ema.{name}": value for name, value in (averages or {}).items()}
    said = {"step": step, "steps": 40, "tokens": 64 * step, "metrics": {}, "plan_id": plan.id, **state}
    sums = write_tensors(backend, tensors, _begun(publisher, final), CollectiveErrors(0, 1, None))
    pointers = ("model",) if alone else ("latest",)
    publisher.publish(final, {**checkpoint_contents(plan), **said}, sums, pointers)
    return final


def _begun(publisher: Publisher, final: Path) -> Path:
    publisher.begin(final)
    return partial_of(final)
