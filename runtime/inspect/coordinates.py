"""Sizes of activations in the first steps of models of several widths or depths: the coordinate check of µP (Yang et
al. 2022, arXiv 2203.03466, appendix D)."""

import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from xtrain.plan.plan import Plan
from xtrain.records.names import EndStatus
from xtrain.runtime.inspect.rank_jobs import RankForks
from xtrain.runtime.loop.executor import Executor
from xtrain.runtime.nn.transformer import Transformer

ENTRY: Final = "xtrain.runtime.inspect.coordinates:run"
FILE: Final = "coordinates.json"
PARTS: Final = ("embedding", "first block", "last block", "logits")
# Positions of a microbatch whose logits are computed once more for their size.
POSITIONS: Final = 128
Sizes = dict[str, list[float]]
"""Part of the model → mean absolute value of its output in each step."""


def measure(plans: Mapping[int, Plan], folder: Path, told: Callable[[str], object], timeout: float) -> dict[int, Sizes]:
    """Run the plan of each size on this machine, and return its `Sizes`. told: called with a line before each.

    Raises RanksFailed if a run fails, or takes more than `timeout` seconds.
    """
    found: dict[int, Sizes] = {}
    with RankForks() as ranks:
        for size, plan in plans.items():
            told(f"training at size {size:,}")
            directory = ranks.complete(plan, folder, name=str(size), timeout=timeout, more={"entry": ENTRY})
            found[size] = json.loads((directory / FILE).read_text())
    return found


class MeasuringExecutor(Executor):
    """Executor that measures the outputs of parts of the model in every training step."""

    def _set_up(self, begin: float) -> None:
        super()._set_up(begin)
        self._sizes: dict[str, dict[int, list[float]]] = {part: defaultdict(list) for part in PARTS}
        model = self.resources["model"].whole
        assert isinstance(model, Transformer)
        blocks = [block for name, block in model.layers.items() if int(name) < model.arch.blocks]
        measured = {"embedding": model.embed_tokens, "first block": blocks[0], "last block": blocks[-1]}
        for part, module in measured.items():
            module.register_forward_hook(partial(self._measure, part))
        model.norm.register_forward_hook(partial(self._measure_logits, model))

    @torch.no_grad()
    def _measure(self, part: str, module: torch.nn.Module, inputs: Any, out: Any) -> None:
        value: Tensor = out[0] if isinstance(out, tuple) else out
        self._sizes[part][self.progress.step].append(value.abs().float().mean().item())

    @torch.no_grad()
    def _measure_logits(self, model: Transformer, norm: torch.nn.Module, inputs: Any, out: Tensor) -> None:
        weight = model.embed_tokens.weight if model.arch.tie_embeddings else model.lm_head.weight
        self._measure("logits", norm, inputs, out.flatten(0, 1)[:POSITIONS] @ weight.T)

    def _shut_down(self, *, failed: bool) -> None:
        if not failed:
            means = {
                part: [sum(values) / len(values) for _, values in sorted(steps.items())]
                for part, steps in self._sizes.items()
            }
            (self.records.directory / FILE).write_text(json.dumps(means))
        super()._shut_down(failed=failed)


def run(job: dict[str, Any], plan: Plan, rank: int) -> int:
    """Execute the plan in the job's directory; return 0 if the run ended as it should."""
    os.chdir(job["folder"])
    status = MeasuringExecutor(plan, Path(job["directory"]), rank=rank).run()
    return 0 if status == EndStatus.DONE else 1
