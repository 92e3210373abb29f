"""A trained run as one process sees it: its model with the latest weights, and its tokenizer."""

import json
from pathlib import Path

import torch
from attrs import frozen

from ...planner.mesh.mesh import AXES
from ...planner.plan import Plan
from ...planner.serialise import from_json
from ..bootstrap import choose_device, set_matmul, use_threads
from ..checkpoint.backend import read_tensors
from ..checkpoint.chosen_weights import evaluated, prefix
from ..checkpoint.model_check import check_weights
from ..checkpoint.sources import find, find_named
from ..data.documents.tokenizers import TextTokenizer, load_tokenizer
from ..errors import EnvironmentFault
from ..models.build import build_model
from ..models.parts import ModelParts
from ..models.tensors import model_tensors
from ..provenance.metadata import started_in
from ..state import Rank
from .text_generator import TextGenerator, continue_text


@frozen(eq=False)
class TrainedRun:
    writer: TextGenerator
    tokenizer: TextTokenizer

    @classmethod
    def load(cls, directory: Path, device: str, checkpoint: str | None = None) -> "TrainedRun":
        """Read the latest checkpoint of a run, or the one that `find_named` finds, of whatever layout; weights alone
        will do. Raises EnvironmentFault where there is none, or it is of another model."""
        if checkpoint is None and not any((directory / "checkpoints").glob("*-s*")):
            raise EnvironmentFault("X708", f"{directory} has no checkpoint yet")
        entry = find(directory, weights=True) if checkpoint is None else find_named(directory, checkpoint)
        plan = from_json(json.loads((directory / "plan.json").read_text()))
        chosen = choose_device(device, local_rank=0)
        use_threads(None, local_world=1)
        set_matmul(plan.node("setup.bootstrap").args["matmul"], chosen)
        rank = _alone(chosen)
        check_weights(plan, entry)
        model = _whole_model(plan, rank)
        read_tensors(model_tensors(model, prefix(entry, evaluated(entry))), entry.path)
        # A tokenizer's folder is relative to where the run was started, not to where it is sampled.
        tokenizer = load_tokenizer(plan.node("setup.tokenizer").args["source"], started_in(directory))
        model.train(False)
        return cls(TextGenerator(model=model, rank=rank), tokenizer)

    def continue_text(self, prompt: str, tokens: int, temperature: float, top_p: float, seed: int) -> str:
        return continue_text(self.writer, self.tokenizer, prompt, tokens, temperature, top_p, seed)


def _alone(device: torch.device) -> Rank:
    return Rank(
        rank=0,
        local_rank=0,
        world_size=1,
        data_rank=0,
        data_ranks=1,
        device=device,
        pipeline_ranks=1,
        coordinates=dict.fromkeys(AXES, 0),
    )


def _whole_model(plan: Plan, rank: Rank) -> ModelParts:
    """The model in one piece, whatever it was cut over while it was trained; its memory holds nothing yet."""
    args = dict(plan.node("setup.build_model").args)
    whole = {"stages": [[0, plan.architecture.layers - 1]], "owners": [[0]]}
    model = build_model(plan, rank, **{**args, **whole, "architecture": plan.architecture})
    model.whole.to_empty(device=rank.device)
    return model
