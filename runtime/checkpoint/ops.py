"""`setup.resume` and `tick.checkpoint`: the full state of a run, saved and found again."""

import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from attrs import define
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from ...planner.kept import kept
from ...planner.plan import Plan
from ..data.errors import DataError
from ..data.loader_state import Remarks
from ..errors import ResumeRefused
from ..feed import Feed
from ..models.parts import Parts
from ..observe import Window
from ..ops import op
from ..records import Records
from ..state import Progress, Rank, Step
from .layout import CheckpointFolder, Entry, size_bytes
from .model_check import check_model
from .tensors import model_tensors, optimizer_tensors, quiet_alone


@define(kw_only=True)
class Saver:
    """Writes checkpoints of this run and reads them back."""

    plan: Plan
    model: Parts
    optimizer: Optimizer
    feed: Feed
    rank: Rank
    progress: Progress
    folder: CheckpointFolder
    keep: int | None
    saved_step: int | None = None

    def _tensors(self) -> dict[str, Any]:
        return {**model_tensors(self.model), **optimizer_tensors(self.model, self.optimizer)}

    def save(self) -> Path:
        """Save the state after `progress.step` steps; on return it is durable and named. Collective."""
        step = self.progress.step
        if self.rank.is_first:
            self.folder.begin(step)
        self._wait()
        with quiet_alone():
            save(self._tensors(), checkpoint_id=self.folder.partial(step), no_dist=self.rank.world_size == 1)
        self._wait()
        if self.rank.is_first:
            self.folder.publish(step, self._state())
            self.folder.retain(self.keep)
        self._wait()
        self.saved_step = step
        return self.folder.path(step)

    def _state(self) -> dict[str, Any]:
        return {
            "step": self.progress.step,
            "tokens": self.progress.tokens,
            "plan_id": self.plan.id,
            "config_id": self.plan.config_id,
            "world_size": self.plan.mesh.world_size,
            "steps": self.feed.steps,
            **kept(self.plan),
            "loader": self.feed.loader.state(self.progress.step),
        }

    def load(self, entry: Entry) -> Remarks:
        """Take over the state of a checkpoint; how the datasets differ from those it was trained on.

        Raises ResumeRefused if it is of another model or of other data.
        """
        state = entry.state()
        check_model(self.plan, entry)
        try:
            remarks = self.feed.resume(state["loader"])
        except DataError as error:
            raise ResumeRefused(f"{entry.path}: {error}") from error
        with quiet_alone():
            load(self._tensors(), checkpoint_id=entry.path, no_dist=self.rank.world_size == 1)
        self.progress.step, self.progress.tokens = state["step"], state["tokens"]
        self.saved_step = state["step"]
        return remarks

    def _wait(self) -> None:
        if self.rank.world_size > 1:
            dist.barrier()


@op("setup.resume", gives="saver")
def resume_latest(
    plan: Plan,
    model: Parts,
    optimizer: Optimizer,
    feed: Feed,
    rank: Rank,
    progress: Progress,
    records: Records,
    window: Window,
    resume: bool,
    keep: int | None,
) -> Saver:
    """Go on from the latest checkpoint of this run, if there is one and `resume` says so."""
    saver = Saver(
        plan=plan,
        model=model,
        optimizer=optimizer,
        feed=feed,
        rank=rank,
        progress=progress,
        folder=CheckpointFolder(records.directory / "checkpoints"),
        keep=keep,
    )
    window.clear()
    entry = saver.folder.latest() if resume else None
    if entry is not None:
        if saver.folder.named() not in ("", entry.path.name):
            message = f"checkpoint {saver.folder.named()} is damaged or gone; going on from {entry.path.name}"
            records.event("warning", step=entry.step, message=message)
        for message in saver.load(entry).in_words():
            records.event("warning", step=entry.step, message=message)
        before = entry.state()["steps"]
        if before != feed.steps and plan.node("setup.scheduler").args["kind"] != "constant":
            message = f"the learning rate was laid out over {before:,} steps, now over {feed.steps:,}: it jumps here"
            records.event("warning", step=entry.step, message=message)
        records.event("resumed", step=progress.step, path=str(entry.path))
    return saver


@op("tick.checkpoint")
def checkpoint(saver: Saver, records: Records, progress: Progress, node_id: str):
    """Save, unless this very step is saved already."""

    def run(step: Step) -> None:
        if saver.saved_step == progress.step:
            return
        begin = time.perf_counter()
        path = saver.save()
        records.event(
            "checkpoint",
            step=progress.step,
            node=node_id,
            path=str(path),
            bytes=size_bytes(path),
            seconds=time.perf_counter() - begin,
        )

    return run
