"""Models that continue texts, each in one process."""

from pathlib import Path
from typing import Any

import torch
from reference_models import CONFIGS, in_our_names, make
from torch import Tensor

from xtrain.plan.plan import Plan
from xtrain.planner.load import plan_from_text
from xtrain.runtime.nn.batch import ModelBatch
from xtrain.runtime.nn.loss import whole_logits
from xtrain.runtime.nn.weights import model_tensors
from xtrain.runtime.sampling.text_generator import TextGenerator
from xtrain.runtime.sampling.trained_run import alone, whole_model

SPEC = """
experiment tiny {{ seed = 1, budget = 1 steps }}
model {model}
tokenizer bytes
dataset made {{ source = synthetic(documents = 10) }}
batch {{ sequence = 32 }}
optimizer adamw {{ lr = 1e-3 }}
precision {{ params = fp64 }}
"""


def plan_of(model: str) -> Plan:
    """Of a model in fp64, as a spec declares it."""
    compiled = plan_from_text(SPEC.format(model=model), "tiny.xtrain")
    assert compiled.plan is not None, compiled.diagnostics.render()
    return compiled.plan


def generator_of(plan: Plan) -> TextGenerator:
    """With weights drawn so that logits differ and experts are chosen."""
    rank = alone(torch.device("cpu"))
    model = whole_model(plan, rank)
    model.train(False)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=random)
    model.whole.fill_buffers()
    return TextGenerator(model=model, rank=rank)


def beside(family: str, name: str, folder: Path) -> tuple[TextGenerator, Any]:
    """A model of transformers in fp64, and ours with its weights."""
    theirs = make(family, name, folder).double().eval()
    theirs.set_experts_implementation("eager")  # grouped products know no fp64
    ours = generator_of(plan_of(f'"{folder}" {{ weights = none }}'))
    values = dict(in_our_names(theirs, theirs.state_dict().items()))
    with torch.no_grad():
        for its_name, tensor in model_tensors(ours.model, "").items():
            tensor.copy_(values.pop(its_name))
    assert not values.keys() - {"lm_head.weight"}
    return ours, theirs


@torch.no_grad()
def recomputed_logits(author: TextGenerator, ids: list[int]) -> Tensor:
    """Logits [V] behind a text, computed of all of it, without a cache."""
    model = author.model.whole
    batch = ModelBatch.of(_whole(ids), torch.device("cpu"))
    assert batch.input_ids_BS is not None
    x_BSD = model.embed(batch.input_ids_BS)
    rotations = model.rotations(batch.positions_BS, x_BSD.dtype)
    for block in model.layers.values():
        x_BSD = block(x_BSD, rotations[block.angles], batch.packing, batch.real_BS)
    head = model.embed_tokens if model.arch.tie_embeddings else model.lm_head
    return whole_logits(model.norm(x_BSD)[:, -1], head.weight, model.head)[0]


def _whole(ids: list[int]) -> Any:
    from xtrain.runtime.feed.microbatch import Microbatch

    tokens_BS = torch.tensor([ids])
    return Microbatch(
        input_ids_BS=tokens_BS,
        labels_BS=None,
        positions_BS=torch.arange(len(ids))[None],
        real_BS=torch.ones_like(tokens_BS, dtype=torch.bool),
        cumulative_lengths=torch.tensor([0, len(ids)], dtype=torch.int32),
        real_lengths=torch.tensor([len(ids)], dtype=torch.int32),
        num_valid=0,
    )


__all__ = ["CONFIGS", "beside", "generator_of", "plan_of", "recomputed_logits"]
