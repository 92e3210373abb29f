"""State of a checkpoint, the order in which it is restored, and the choice of an intact checkpoint."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from attrs import frozen
from torch import Tensor
from torch.optim import Optimizer

from xtrain.plan.checkpoints import checkpoint_contents
from xtrain.plan.plan import Plan
from xtrain.plan.step_sizes import past_of
from xtrain.runtime.base import device as streams
from xtrain.runtime.base.errors import DataError, ResumeRefused, StorageFailed
from xtrain.runtime.base.mesh import CollectiveErrors
from xtrain.runtime.base.state import Progress, Rank
from xtrain.runtime.feed.curriculum import Remarks
from xtrain.runtime.feed.setup import Feed
from xtrain.runtime.nn.averages import WeightAverages
from xtrain.runtime.nn.axes import local
from xtrain.runtime.nn.optimizer import KeepsPieces
from xtrain.runtime.nn.parallelize import reshard
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.nn.weights import optimizer_tensors, saved_tensors
from xtrain.runtime.store.checkpoints import CheckpointEntry, CheckpointFolder, flaws
from xtrain.runtime.store.reading import read_tensors
from xtrain.runtime.store.rollback import onward

# The learning rate is not stored: it is a closed form of the counters.
ORDER: Final = ("model", "ema", "optimizer", "loader", "counters", "completions", "rng")


class KeptFile(Protocol):
    """State that a checkpoint stores in a file `name` of its own, at some steps only."""

    name: str

    def packed(self, step: int) -> bytes | None:
        """Return the content after `step` steps, on the first rank; None for no file. Collective."""
        ...

    def take(self, content: bytes | None) -> None:
        """Restore the state from a result of `packed`."""
        ...


@frozen(kw_only=True)
class Restored:
    """Outcome of each group of a restored checkpoint, in the order of restoring; `remarks` are the loader's.

    Values: read; begun: the average starts at the weights that were read; dropped: the plan keeps no average; own:
    random streams continue; anew: they start from seed, step and rank.
    """

    groups: dict[str, str]
    remarks: Remarks | None


@frozen(kw_only=True, eq=False)
class FullState:
    """Live state of a run on this rank. ema: None if the plan keeps no average. base: digest of the parameters that
    checkpoints leave out, None without such. completions: completions that later steps train on, or success
    rates of prompts; None if each step samples its own from the data."""

    plan: Plan
    rank: Rank
    model: ModelParts
    ema: WeightAverages | None
    optimizer: Optimizer
    feed: Feed
    progress: Progress
    base: str | None = None
    completions: KeptFile | None = None

    # Saving -----------------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors under their names in a checkpoint. Random streams are copied now."""
        own = {self._stream(name): state for name, state in streams.streams(self.rank.device).items()}
        averages = self.ema.tensors() if self.ema is not None else {}
        return {
            **self._model_tensors(),
            **averages,
            **self._optimizer_tensors(),
            **own,
        }

    def given(self) -> tuple[dict[str, Tensor], ...]:
        """Return the tensors that `take` reads on another rank in the same place, in its order."""
        averages = self.ema.tensors() if self.ema is not None else {}
        return self._model_tensors(), averages, self._optimizer_tensors()

    def files(self) -> dict[str, bytes]:
        """Return name → content of the files that hold no tensors, on the first rank. Collective."""
        packed = self.completions.packed(self.progress.step) if self.completions is not None else None
        return {self.completions.name: packed} if self.completions is not None and packed is not None else {}

    def weights(self, *, averaged: bool = True) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the weights to publish under the names of a model, and their description. averaged: the averages, if
        they are published."""
        if averaged and self.ema is not None and self.ema.publishes and self.ema.updates:
            return self.ema.tensors("model"), {"weights": "averaged", "ema": self.ema.described()}
        return self._model_tensors(), {"weights": "trained"}

    def described(self) -> dict[str, Any]:
        """Return the JSON description of the state, without its tensors."""
        step = self.progress.step
        datasets = self.feed.datasets.items()
        references = {name: dict(dataset.reference) for name, dataset in datasets if dataset.reference}
        measured = {
            name: value for name, (at, value) in self.progress.measured.items() if at == step and math.isfinite(value)
        }
        return {
            **self.progress.counters(),
            "metrics": measured,
            "time": time.time(),
            "plan_id": self.plan.id,
            "config_id": self.plan.config_id,
            "world_size": self.plan.mesh.world_size,
            "steps": self.feed.steps,
            **self._epochs(step),
            **({"ema": self.ema.described()} if self.ema is not None else {}),
            "rng": self._described_streams(streams.streams(self.rank.device)),
            **checkpoint_contents(self.plan),
            **({"base_content": self.base} if self.base is not None else {}),
            **({"references": references} if references else {}),
            "loader": self.feed.loader.state(step),
            **({"batches": self.feed.batch.row_sizes.described()} if self.feed.batch is not None else {}),
        }

    def _epochs(self, step: int) -> dict[str, Any]:
        """Return the epochs of data that the run has read, and the epoch that its last step ended, if any."""
        epoch, batch = self.feed.epoch(step), self.feed.batch
        if epoch is None or batch is None:
            return {}
        return {"epoch": epoch, "epoch_ended": batch.epoch_ended(step)}

    # Putting back -----------------------------------------------------------------------------------------------------

    def restore(self, entry: CheckpointEntry, collective: CollectiveErrors) -> Restored:
        """Restore a full checkpoint in place; after a rollback, with the data that follows the skipped rows.
        Collective.

        Counters follow the loader, so that a refusal leaves them unchanged; random streams come last, because earlier
        groups may draw numbers. Raises ResumeRefused if the checkpoint's rows come from other data.
        """

        def read(tensors: dict[str, Tensor]) -> str:
            read_tensors(tensors, entry.path, collective)
            return "read"

        return self.take(onward(entry), read, entry.path)

    def take(self, state: dict[str, Any], read: Callable[[dict[str, Tensor]], str], source: Path) -> Restored:
        """Restore the state described by `state` (from `described`); `read` fills the tensors of model, averages,
        optimizer and random streams in place. source: its origin, for errors."""
        reshard(self.model)  # parameters have the names of their shards only while sharded
        remarks: list[Remarks] = []

        def loader() -> str:
            try:
                remarks.append(self.feed.resume(state["loader"], past_of(state)))
            except DataError as error:
                raise ResumeRefused(f"{source}: {error}") from error
            return "read"

        def counters() -> str:
            self.progress.take(state)
            return "read"

        put_back: dict[str, Callable[[], str]] = {
            "model": lambda: self._restore_model(read),
            "ema": lambda: self._restore_ema(state, read),
            "optimizer": lambda: self._restore_optimizer(read),
            "loader": loader,
            "counters": counters,
            "completions": lambda: self._restore_completions(source),
            "rng": lambda: self._restore_streams(state, read),
        }
        groups = {name: put_back[name]() for name in ORDER}
        return Restored(groups={name: word for name, word in groups.items() if word}, remarks=next(iter(remarks), None))

    def _model_tensors(self) -> dict[str, Tensor]:
        own = self.optimizer.weights() if isinstance(self.optimizer, KeepsPieces) else {}
        return saved_tensors(self.model, self.plan) | own

    def _restore_model(self, read: Callable[[dict[str, Tensor]], str]) -> str:
        tensors = self._model_tensors()
        word = read(tensors)
        if isinstance(self.optimizer, KeepsPieces):
            self.optimizer.take_weights(tensors)
        return word

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        if isinstance(self.optimizer, KeepsPieces):
            return self.optimizer.tensors(self.plan)
        return optimizer_tensors(self.model, self.optimizer, self.plan)

    def _restore_optimizer(self, read: Callable[[dict[str, Tensor]], str]) -> str:
        tensors = self._optimizer_tensors()
        word = read(tensors)
        if isinstance(self.optimizer, KeepsPieces):
            self.optimizer.take(self.plan, tensors)
        return word

    def _restore_ema(self, state: dict[str, Any], read: Callable[[dict[str, Tensor]], str]) -> str:
        saved = state.get("ema")
        if self.ema is None:
            return "dropped" if saved else ""
        if saved is None:
            self.ema.restart()
            return "begun"
        word = read(self.ema.tensors())
        self.ema.updates = saved["updates"]
        return word

    def _restore_completions(self, source: Path) -> str:
        if self.completions is None:
            return ""
        file = source / self.completions.name
        self.completions.take(file.read_bytes() if file.exists() else None)
        return "read" if file.exists() else ""

    def _restore_streams(self, state: dict[str, Any], read: Callable[[dict[str, Tensor]], str]) -> str:
        """Restore random streams, which only fit the same mesh: in another mesh a rank reads other rows."""
        saved = state.get("rng")
        now = streams.streams(self.rank.device)
        # Only one replica group's streams are saved, and each group reads other rows.
        if saved is None or saved != self._described_streams(now) or self.rank.replica is not None:
            streams.begin(self.plan.seed, state["step"], self.rank.row_rank)
            return "anew"
        read({self._stream(name): stream for name, stream in now.items()})
        streams.put_back(now, self.rank.device)
        return "own"

    def _stream(self, name: str) -> str:
        return f"rng.{self.rank.rank:05d}.{name}"

    def _described_streams(self, rank_streams: dict[str, Tensor]) -> dict[str, Any]:
        """Return the description of the streams of every rank."""
        axes = [[axis.name, axis.size] for axis in self.plan.mesh.axes]
        return {"axes": axes, "sizes": {name: state.numel() for name, state in rank_streams.items()}}


Send = Callable[[Tensor], None]
"""Sends bytes, uint8 [n], in host memory."""
Receive = Callable[[int], Tensor]
"""Receives the next n bytes."""
_LENGTH = 8


def give(state: FullState, beside: dict[str, Any], send: Send) -> None:
    """Send the state to another rank. beside: further JSON values."""
    text = json.dumps({**state.described(), **beside}).encode()
    send(torch.tensor([len(text)]).view(torch.uint8))
    send(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    for tensors in state.given():
        for name in sorted(tensors):
            send(local(tensors[name]).detach().cpu().contiguous().view(-1).view(torch.uint8))


def take(state: FullState, receive: Receive, source: Path) -> dict[str, Any]:
    """Restore in place the state that `give` of another rank sends; return its description. source: its origin, for
    errors.

    Raises ResumeRefused if its rows come from other data.
    """
    length = int(receive(_LENGTH).view(torch.int64).item())
    said: dict[str, Any] = json.loads(bytes(receive(length).tolist()))

    @torch.no_grad()
    def read(tensors: dict[str, Tensor]) -> str:
        for name in sorted(tensors):
            own = local(tensors[name])
            content = receive(own.numel() * own.element_size())
            own.copy_(content.view(own.dtype).view(own.shape))
        return "read"

    state.take(said, read, source)
    return said


# Called for every rejected checkpoint: (entry, flaw).
Report = Callable[[CheckpointEntry, str], None]


def choose(
    folder: CheckpointFolder, collective: CollectiveErrors, *, content: bool, report: Report
) -> CheckpointEntry | None:
    """Return the checkpoint that `latest` names, or else the newest intact one; None if the folder has none.

    content: also compare checksums, with the files dealt among ranks. Collective, with one result for all. Raises
    ResumeRefused if no checkpoint is intact: starting from scratch would hide that.
    """
    candidates = collective.first(folder.candidates)
    for entry in candidates:
        flaw = flaw_of(entry, collective, content=content)
        if not flaw:
            return entry
        report(entry, flaw)
    if candidates:
        raise ResumeRefused(
            f"no checkpoint in {folder.root} is intact; `xtrain checkpoint verify` lists the defects of each, and "
            "checkpoint.resume = false starts from scratch"
        )
    return None


def flaw_of(entry: CheckpointEntry, collective: CollectiveErrors, *, content: bool) -> str:
    """Describe a defect of a checkpoint; empty if there is none. Collective, with one result for all."""
    part = (collective.rank, collective.size)
    try:
        rank_flaws = collective.all(lambda: flaws(entry.path, content=content, part=part))
    except StorageFailed as failure:
        return str(failure)
    return next((flaw for own_flaws in rank_flaws for flaw in own_flaws), "")
