"""A trained run as one process sees it: its model with the latest weights, and its tokenizer."""

import json
from pathlib import Path

from attrs import frozen
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load

from ..planner.serialise import from_json
from .bootstrap import choose_device, set_matmul, use_threads
from .build import build_model
from .checkpoint.layout import CheckpointFolder
from .checkpoint.model_check import check_model
from .checkpoint.tensors import model_tensors, quiet_alone
from .data.tokenizers import Tokenizer, load_tokenizer
from .errors import EnvironmentFault
from .sample import continue_text
from .state import Rank
from .weights import tie


@frozen(eq=False)
class TrainedRun:
    model: nn.Module
    tokenizer: Tokenizer
    rank: Rank

    @classmethod
    def load(cls, directory: Path, device: str) -> "TrainedRun":
        """Read the latest checkpoint, of whatever layout. Raises EnvironmentFault where there is none."""
        entry = CheckpointFolder(directory / "checkpoints").latest()
        if entry is None:
            raise EnvironmentFault("X708", f"{directory} has no checkpoint yet")
        plan = from_json(json.loads((directory / "plan.json").read_text()))
        chosen = choose_device(device, local_rank=0)
        use_threads(None, local_world=1)
        set_matmul(plan.node("setup.bootstrap").args["matmul"], chosen)
        rank = Rank(rank=0, local_rank=0, world_size=1, data_rank=0, data_ranks=1, device=chosen)
        args = dict(plan.node("setup.build_model").args)
        model = build_model(plan, rank, **{**args, "architecture": plan.architecture}).to_empty(device=chosen)
        tie(model)
        check_model(plan, entry)
        with quiet_alone():
            load(model_tensors(model), checkpoint_id=entry.path, no_dist=True)
        # A tokenizer's folder is relative to where the run was started, not to where it is sampled.
        folder = json.loads((directory / "metadata" / "environment.json").read_text())["folder"]
        tokenizer = load_tokenizer(plan.node("setup.tokenizer").args["source"], Path(folder))
        return cls(model.eval(), tokenizer, rank)

    def continue_text(self, prompt: str, tokens: int, temperature: float, top_p: float, seed: int) -> str:
        return continue_text(self.model, self.tokenizer, self.rank, prompt, tokens, temperature, top_p, seed)
