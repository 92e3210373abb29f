"""Saving of the state of a run as declared: at once, or beside training from a copy in host memory."""

import math
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal

import torch
from attrs import define, field
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from xtrain.plan.checkpoints import Pointer
from xtrain.records.training_events import BestEvent, CheckpointEvent, ModelEvent, PrunedEvent
from xtrain.runtime.base.errors import StorageFailed
from xtrain.runtime.base.state import Progress
from xtrain.runtime.observe.records import Records
from xtrain.runtime.store.checkpoints import (
    CheckpointEntry,
    CheckpointFolder,
    entry_of,
    read_sidecar,
    total_bytes,
    write_late_metrics,
)
from xtrain.runtime.store.full_state import FullState
from xtrain.runtime.store.writing import Transaction
from xtrain.text.units import bytes_text


class HostCopy:
    """Copies into buffers that are kept from save to save.

    pinned: page-locked buffers, into which a GPU copies by itself on a stream of its own; without a GPU no difference.
    """

    def __init__(self, *, pinned: bool, device: torch.device) -> None:
        self._device = device
        own_stream = pinned and device.type == "cuda"
        options = StagingOptions(
            use_pinned_memory=own_stream,
            use_shared_memory=False,
            use_async_staging=True,
            use_non_blocking_copy=own_stream,
        )
        self._stager = DefaultStager(options)
        # torch 2.11 closes what copies behind every copy: the next one would fail, and have no buffers.
        copier = self._stager._state_dict_stager
        self._close, copier.close = copier.close, lambda: None
        self._under_way: Future[dict[str, Any]] | None = None

    def prepare(self, tensors: dict[str, Any]) -> None:
        """Make the buffers, and touch all of their memory, before training waits for that in its first save."""
        self.begin(tensors)
        self.wait()

    def begin(self, tensors: dict[str, Any]) -> Future[dict[str, Any]]:
        """Start to copy; the buffers may be written again when nobody needs the last copy any more."""
        if self._device.type == "cuda":
            # The copy goes beside the stream that the last update was computed on, and must not overtake it.
            torch.cuda.current_stream(self._device).synchronize()
        found = self._stager.stage(tensors)
        assert isinstance(found, Future)
        self._under_way = found
        return found

    def wait(self) -> None:
        """Return when what is being copied may be changed. Raises what the copying raised."""
        if self._under_way is not None:
            self._under_way.result()
            self._under_way = None

    def close(self) -> None:
        self._stager.close()
        self._close()


Mode = Literal["sync", "async", "async_pinned"]
Overlap = Literal["wait", "latest"]
# What is said of a full state and not of weights alone.
OF_FULL_STATES: Final = ("loader", "optimizer", "rng", "ema", "record")


@define(kw_only=True, eq=False)
class Saver:
    """Writes checkpoints of a run.

    overlap: what a save does that comes due while another is being written: wait for it, or come later. best: the
    metric whose least value `best` follows, or the highest if `highest`; None without one. failures: how many saves in
    a row may fail, None for any number. staging: None where saves are made at once. begun_from: where the run got its
    first state, if not from itself. written_by: versions, and the state of the user's code. Methods without another
    word are collective, and all ranks leave them alike.
    """

    state: FullState
    records: Records
    transaction: Transaction
    overlap: Overlap
    best: str | None
    highest: bool = False
    failures: int | None
    staging: HostCopy | None = None
    saved_step: int | None
    begun_from: dict[str, Any] | None
    written_by: dict[str, Any]
    may_begin: Callable[[], bool] = lambda: True
    """Whether a save that is due now is made now, whatever is still being written; the same on all ranks."""
    writes: Callable[[], bool] = lambda: True
    """Whether these ranks save what is due: of several replica groups one does, for all have the same state."""
    hooks: Callable[[str], None] = lambda place: None
    """Calls the hooks of a place, before and after a save that is made."""
    look: Callable[[], None] = lambda: None
    """Finds out, on the first rank, whether the folder of the run is where it was."""
    put_off: str = ""
    """The node of a save that was due while another one was being written, and is still to be made."""
    _failed: int = 0
    _under_way: Future[StorageFailed | None] | None = None
    _job: "SaveJob | None" = None
    """The save whose copy is being made."""

    @property
    def progress(self) -> Progress:
        return self.state.progress

    @property
    def folder(self) -> CheckpointFolder:
        return self.transaction.publisher.folder

    @property
    def beside(self) -> bool:
        """Whether training goes on while a save is written that it does not end with."""
        return self.staging is not None

    @property
    def busy(self) -> bool:
        """Whether this rank is still writing; not collective, and ranks may differ."""
        return self._under_way is not None and not self._under_way.done()

    def save(self, node: str, *, must: bool) -> None:
        """Save the state after `progress.step` steps, unless it is saved already.

        A save that is still being written is waited for first. must: return when it is durable, and raise StorageFailed
        should it fail; else go on as soon as a copy is under way, and raise only if too many have failed.
        """
        begin = time.perf_counter()
        self._prepare(must=must)
        self.put_off = ""
        step = self.progress.step
        if self.saved_step == step:
            return
        self.saved_step = step
        if not self.writes():
            return
        with suppress(OSError):  # a save there fails, and says why
            self.look()
        self.hooks("before_checkpoint")
        job = SaveJob(node, step, self.folder.path(step), self._described(), begin, files=self.state.files())
        tensors = self.state.tensors()
        if must or not self.beside:
            failure = self._write(job, tensors)
            if failure is not None and must:
                self.saved_step = None
                raise failure
            self._take(failure, raises=True)
            if failure is not None:
                return
        else:
            self._begin(job, tensors)
        self.hooks("after_checkpoint")

    def _prepare(self, *, must: bool) -> None:
        """Before another save: the one that is being written has ended."""
        self.settle(raises=not must)

    def _begin(self, job: "SaveJob", tensors: dict[str, Any]) -> None:
        """Write beside training."""
        assert self.staging is not None
        staged = self.staging.begin(tensors)
        self._under_way, self._job = Future(), job
        job.blocked = time.perf_counter() - job.began
        threading.Thread(target=self._write_beside, args=(job, staged, self._under_way), daemon=True).start()

    def await_copy(self) -> None:
        """Return when the state may be changed; waits for this rank's copy alone."""
        if self.staging is not None and self._job is not None:
            begin = time.perf_counter()
            self.staging.wait()
            self._job.blocked = (self._job.blocked or 0.0) + time.perf_counter() - begin
            self._job = None

    def settle(self, *, raises: bool = True) -> None:
        """Wait for the save that is being written. raises: StorageFailed, if too many have failed."""
        if self._under_way is not None:
            self.await_copy()
            under_way, self._under_way = self._under_way, None
            self._take(under_way.result(), raises=raises)

    def drain(self, seconds: float) -> None:
        """Give a save that is being written so many seconds to end, however the run has ended; not collective."""
        if self._under_way is not None:
            wait([self._under_way], seconds)

    def prune(self, begun: CheckpointEntry) -> None:
        """Before the first save: remove what earlier starts have kept and this one does not, so that a smaller `keep`
        makes room on a full disk. What the run goes on from stays: another one that looks whole may be damaged."""
        if self.writes() and (removed := self._retain(begun)):
            self.records.event(PrunedEvent(step=self.progress.step, checkpoints=removed))

    def measured(self, metric: str) -> None:
        """A metric of the state as it is has been measured: where that is saved already, it can be the best from now
        on. One that was saved with a value of the metric stays with that.

        Waits for the save; in a step in which both are due a plan measures before it saves.
        """
        step, (at, value) = self.progress.step, self.progress.measured[metric]
        if metric != self.best or self.saved_step != step or at != step or not math.isfinite(value):
            return
        if not self.writes():
            return
        self.settle()
        if self.saved_step != step:
            return  # the save has failed
        final = self.folder.path(step)
        try:
            best = self.transaction.collective.first(lambda: self._measured_late(final, metric, value))
        except StorageFailed as failure:
            message = f"the metrics of {final.name} could not be saved, so it cannot be the best checkpoint: {failure}"
            self.records.warn(message, step=step)
            return
        if best:
            self.records.event(BestEvent(step=step, path=str(final), best={metric: value}))

    def _measured_late(self, final: Path, metric: str, value: float) -> bool:
        """On the first rank: whether the checkpoint is the best so far."""
        entry = entry_of(final)
        if entry is None or entry.flaws() or metric in entry.state()["metrics"]:
            return False
        write_late_metrics(final, {metric: value})
        before = self._best_before(final)
        if before is not None and not self.better(value, before):
            return False
        self.transaction.publisher.point("best", final.name)
        return True

    def save_model(self, node: str) -> None:
        """Save the weights alone, for publishing. Raises StorageFailed if that fails."""
        begin = time.perf_counter()
        self.settle(raises=False)
        if not self.writes():
            return
        final = self.folder.model_path(self.progress.step)
        tensors, said = self.state.weights()
        state = {name: value for name, value in self._described().items() if name not in OF_FULL_STATES}
        self.transaction.run(final, tensors, {**state, **said}, ("model",))
        self._retain()
        self.records.event(
            ModelEvent(
                step=self.progress.step,
                node=node,
                path=str(final),
                bytes=self._bytes(final),
                seconds=time.perf_counter() - begin,
                **said,
            )
        )

    def _write(self, job: "SaveJob", tensors: dict[str, Any]) -> StorageFailed | None:
        # A run that is killed behind the save goes on behind its step: what is missing then stays missing.
        self.records.settle(job.step)
        pointers = self._pointers(job)
        try:
            self.transaction.run(job.final, tensors, job.state, pointers, job.files)
        except StorageFailed as failure:
            self._report(job, failure)
            return failure
        self.records.event(
            CheckpointEvent(
                step=job.step,
                node=job.node,
                path=str(job.final),
                bytes=self._bytes(job.final),
                seconds=time.perf_counter() - job.began,
                epoch=job.state.get("epoch"),
                blocked_seconds=job.blocked,
                best={self.best: job.state["metrics"][self.best]} if self.best and "best" in pointers else None,
            )
        )
        self._retain()
        return None

    def _write_beside(self, job: "SaveJob", staged: Future[dict[str, Any]], outcome: Future) -> None:
        """What the thread does: collectives over a group of its own, one save at a time."""
        try:
            outcome.set_result(self._write(job, staged.result()))
        except BaseException as error:  # told to whoever waits for the outcome
            outcome.set_exception(error)

    def _retain(self, begun: CheckpointEntry | None = None) -> list[str]:
        try:
            return self.transaction.retain(begun=begun)
        except StorageFailed as failure:
            message = f"old checkpoints could not be removed: {failure}"
            self.records.warn(message, step=self.progress.step)
            return []

    def _take(self, failure: StorageFailed | None, *, raises: bool) -> None:
        """Count failures in a row; all ranks have the same outcome at the same step."""
        if failure is None:
            self._failed = 0
            return
        self.saved_step = None
        self._failed += 1
        if raises and self.failures is not None and self._failed >= self.failures:
            raise failure

    def _report(self, job: "SaveJob", failure: StorageFailed) -> None:
        if not self.records.speaks:
            return
        latest = self.folder.latest()
        last = f"the last checkpoint is of step {latest.step:,}" if latest else "there is no checkpoint yet"
        message = f"the checkpoint of step {job.step:,} could not be saved, {last}: {failure}"
        with suppress(OSError):
            root, size = self.folder.root, self.state.plan.estimates.checkpoint_bytes
            if (free := shutil.disk_usage(root).free) < size:
                message += f"; a checkpoint takes {bytes_text(size)}, and {bytes_text(free)} are free in {root}"
        self.records.warn(message, step=job.step, code=failure.code)

    def _bytes(self, final: Path) -> int:
        return total_bytes(read_sidecar(final)) if self.records.first else 0

    def _pointers(self, job: "SaveJob") -> tuple[Pointer, ...]:
        value = job.state["metrics"].get(self.best)
        if value is None:
            return ("latest",)
        before = self._best_before(job.final)
        return ("latest", "best") if before is None or self.better(value, before) else ("latest",)

    def better(self, value: float, before: float) -> bool:
        """Whether one value of the metric of `best` is better than another."""
        return value > before if self.highest else value < before

    def _best_before(self, final: Path) -> float | None:
        """What the checkpoint has measured that `best` names; where it is to make way for `final`, the next best."""
        entry = self.folder.pointed("best")
        if entry is not None and entry.path == final and self.best:
            entry = self.folder.best_of(self.best, highest=self.highest, besides=entry.name)
        return entry.state().get("metrics", {}).get(self.best) if entry else None

    def _described(self) -> dict[str, Any]:
        begun = {"begun_from": self.begun_from} if self.begun_from else {}
        # A run that is killed right behind the save goes on behind the step, and will not measure it again: what is to
        # be recorded of it is kept as well.
        return {**self.state.described(), "made_by": self.written_by, **begun, **self.records.unwritten()}


@define(eq=False)
class SaveJob:
    """A save under way. began: when it was asked for; blocked: seconds for which training stood still. files: what is
    written beside tensors, on the first rank."""

    node: str
    step: int
    final: Path
    state: dict[str, Any]
    began: float
    blocked: float | None = None
    files: dict[str, bytes] = field(factory=dict)
