"""`tick.memory_snapshot`: memory of ranks next to the figures of the plan, in `profile/memory-<step>/`."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch
from attrs import define, field
from torch.optim import Optimizer

from xtrain.plan.estimates import Memory
from xtrain.plan.plan import Plan
from xtrain.records.training_events import MemorySnapshotEvent
from xtrain.regular_files import read_json
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Progress, Rank
from xtrain.runtime.loop.commands import UnderWay
from xtrain.runtime.loop.memory_report import (
    count_reports,
    file_of,
    folder_of,
    from_first,
    planned_of,
    rank_memory,
    report_name,
    snapshot_text,
    summed,
    sweep,
    write_json,
    write_whole,
)
from xtrain.runtime.nn.averages import WeightAverages
from xtrain.runtime.nn.batch import Step, StepCall
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.observe.heartbeat import HeartbeatWriter
from xtrain.runtime.observe.records import Records

# Latest events that an allocator remembers.
MOST_ACTS: Final = 100_000


@define(kw_only=True, eq=False)
class Snapshot:
    """Snapshot that is taken after `history` more steps.

    planned: of this rank's pipeline coordinate. ranks: to measure; None for all.
    """

    kind: str = field(default="memory_snapshot", init=False)
    node: str
    ranks: list[int] | None
    history: int
    model: ModelParts
    optimizer: Optimizer
    ema: WeightAverages | None
    planned: Memory
    rank: Rank
    records: Records
    progress: Progress
    beat: HeartbeatWriter | None
    passed: int = 0
    _fault: str = field(default="", init=False)

    def begin(self) -> bool:
        """Take the snapshot, or return True if it waits for steps. Collective if it does not wait."""
        if self.rank.device.type != "cuda":
            self.history = 0  # for a plan with device = auto
        if not self.history:
            self._take("")
            return False
        if self._looks:
            self._try(lambda: torch.cuda.memory._record_memory_history(max_entries=MOST_ACTS))
        return True

    def after_step(self) -> bool:
        self.passed += 1
        if self.passed < self.history:
            return True
        self._take("")
        return False

    def cut_short(self, why: str) -> None:
        self._take(f"taken early, as {why}")

    def drop(self) -> None:
        self._forget()

    @property
    def _looks(self) -> bool:
        return self.ranks is None or self.rank.rank in self.ranks

    def _forget(self) -> None:
        if self.history and self._looks:
            with suppress(Exception):
                torch.cuda.memory._record_memory_history(enabled=None)

    def _try(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:  # a failed snapshot must not affect training
            self._fault = self._fault or str(error) or repr(error)
            return None

    def _take(self, note: str) -> None:
        """Write and report the snapshot. Collective."""
        began, step = time.perf_counter(), self.progress.step
        if self.beat is not None:
            self.beat.at(self.node, lasting=True)
        if self.rank.is_first:
            sweep(self.records.directory)
        name = f"memory-{step:012d}"
        number = from_first(self.rank, lambda: count_reports(self.records.directory, name))
        folder = folder_of(self.records.directory) / report_name(name, number)
        own: dict[str, Any] = {}
        size = (self._try(lambda: self._write(folder, own)) or 0) if self._looks else 0
        self._forget()
        if self._fault:
            message = f"rank {self.rank.rank} could not write its memory snapshot {folder}: {self._fault}"
            self.records.warn(message, step=step, every_rank=True)
        failures, size = summed(self.rank, bool(self._fault), size)
        count = self.rank.world_size if self.ranks is None else len(self.ranks)
        if not self.rank.is_first or failures >= count:
            return
        page = self._page(folder, note)
        self.records.event(
            MemorySnapshotEvent(
                step=step,
                node=self.node,
                path=str(folder),
                ranks=count - int(failures),
                seconds=time.perf_counter() - began,
                bytes=int(size) + page,
                note=note,
                tensors=own.get("held"),
                allocator=own.get("allocator"),
                process=own.get("process"),
                planned=own.get("planned"),
            )
        )

    def _page(self, folder: Path, note: str) -> int:
        """Write the summary of all ranks; return its bytes. A failure is only a warning."""
        try:
            return self._write_page(folder, note)
        except Exception as error:  # the files of ranks exist
            message = f"the summary of {folder} could not be written: {error}"
            self.records.warn(message, step=self.progress.step)
            return 0

    def _write(self, folder: Path, own: dict[str, Any]) -> int:
        """Write this rank's files; return their bytes. The measurement is added to `own`."""
        size = 0
        if self.history:
            pickle = file_of(folder, self.rank.rank, "pickle")
            size = write_whole(pickle, lambda beside: torch.cuda.memory._dump_snapshot(str(beside)))
        own |= rank_memory(self.rank, self.progress.step, self.model, self.optimizer, self.ema, self.planned)
        own["history_steps"] = self.passed if self.history else 0
        return size + write_json(file_of(folder, self.rank.rank, "json"), own)

    def _write_page(self, folder: Path, note: str) -> int:
        ranks = [read_json(path) for path in sorted(folder.glob("rank-*.json"))]
        text = snapshot_text(ranks, node=self.node, world=self.rank.world_size, note=note)
        return write_whole(folder / "summary.md", lambda beside: beside.write_text(text, encoding="utf-8"))


@op("tick.memory_snapshot")
def memory_snapshot(
    node_id: str,
    plan: Plan,
    model: ModelParts,
    optimizer: Optimizer,
    rank: Rank,
    records: Records,
    progress: Progress,
    under_way: UnderWay,
    history: int,
    ranks: list[int] | None = None,
    ema: WeightAverages | None = None,
    beat: HeartbeatWriter | None = None,
) -> StepCall:
    """Take a memory snapshot at once or after `history` more steps, unless another snapshot is in progress."""
    planned = planned_of(plan, rank)

    def run(step: Step) -> None:
        if under_way.has("memory_snapshot"):
            message = f"{node_id}: another memory snapshot is being recorded, and this one is skipped"
            records.warn(message, step=progress.step)
            return
        snapshot = Snapshot(
            node=node_id,
            ranks=ranks,
            history=history,
            model=model,
            optimizer=optimizer,
            ema=ema,
            planned=planned,
            rank=rank,
            records=records,
            progress=progress,
            beat=beat,
        )
        if snapshot.begin():
            under_way.begin(snapshot)

    return run
