"""Saving of a run's state, at once or in the background from a copy in host memory."""

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
    """Copy of the state in host buffers that are reused by every save.

    pinned: page-locked buffers, which a GPU copies into on a stream of its own; no effect without a GPU.
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
        # torch 2.11 closes the copier after every copy: the next copy would fail, and have no buffers.
        copier = self._stager._state_dict_stager
        self._close, copier.close = copier.close, lambda: None
        self._under_way: Future[dict[str, Any]] | None = None

    def prepare(self, tensors: dict[str, Any]) -> None:
        """Allocate the buffers and touch their memory, so that the first save does not wait for this."""
        self.begin(tensors)
        self.wait()

    def begin(self, tensors: dict[str, Any]) -> Future[dict[str, Any]]:
        """Start a copy; the last copy must no longer be in use."""
        if self._device.type == "cuda":
            # The copy runs on another stream and must not overtake the last update.
            torch.cuda.current_stream(self._device).synchronize()
        staged = self._stager.stage(tensors)
        assert isinstance(staged, Future)
        self._under_way = staged
        return staged

    def wait(self) -> None:
        """Wait until the copied state may change. Raises the copy's error."""
        if self._under_way is not None:
            self._under_way.result()
            self._under_way = None

    def close(self) -> None:
        self._stager.close()
        self._close()


Mode = Literal["sync", "async", "async_pinned"]
Overlap = Literal["wait", "latest"]
# Entries of the description that only full states have.
OF_FULL_STATES: Final = ("loader", "optimizer", "rng", "ema", "record")


@define(kw_only=True, eq=False)
class Saver:
    """Writer of a run's checkpoints.

    overlap: a save due while another is written waits for it, or is made later. best: the metric that `best` follows,
    the least value or the highest if `highest`; None without one. failures: saves in a row that may fail, None for any
    number. staging: None if saves are made at once. begun_from: origin of the run's first state, if not its own.
    written_by: versions, and the state of the user's code. Methods are collective unless they say otherwise, and end
    alike on all ranks.
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
    """Returns True if a due save is made now even while another is being written; the same on all ranks."""
    writes: Callable[[], bool] = lambda: True
    """Returns True if these ranks save: of several replica groups only one does, because all have the same state."""
    hooks: Callable[[str], None] = lambda place: None
    """Calls the hooks of a place, before and after a save."""
    look: Callable[[], None] = lambda: None
    """Checks on the first rank that the run's folder is still in its place."""
    put_off: str = ""
    """The node of a save that was due while another was being written and is still to be made."""
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
        """True if training continues while a save is written, except for a final one."""
        return self.staging is not None

    @property
    def busy(self) -> bool:
        """True if this rank is still writing; not collective, and ranks may differ."""
        return self._under_way is not None and not self._under_way.done()

    def save(self, node: str, *, must: bool) -> None:
        """Save the state after `progress.step` steps, unless it is saved already.

        First waits for a save that is being written. must: return when the save is durable, and raise StorageFailed if
        it fails; otherwise return once the copy has started, and raise only after too many failures.
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
        with suppress(OSError):  # the save itself fails then, with the reason
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
        """Wait for the running save before another one."""
        self.settle(raises=not must)

    def _begin(self, job: "SaveJob", tensors: dict[str, Any]) -> None:
        """Write in the background."""
        assert self.staging is not None
        staged = self.staging.begin(tensors)
        self._under_way, self._job = Future(), job
        job.blocked = time.perf_counter() - job.began
        threading.Thread(target=self._write_beside, args=(job, staged, self._under_way), daemon=True).start()

    def await_copy(self) -> None:
        """Wait until the state may change: for this rank's copy only."""
        if self.staging is not None and self._job is not None:
            begin = time.perf_counter()
            self.staging.wait()
            self._job.blocked = (self._job.blocked or 0.0) + time.perf_counter() - begin
            self._job = None

    def settle(self, *, raises: bool = True) -> None:
        """Wait for the running save. raises: raise StorageFailed after too many failures."""
        if self._under_way is not None:
            self.await_copy()
            under_way, self._under_way = self._under_way, None
            self._take(under_way.result(), raises=raises)

    def drain(self, seconds: float) -> None:
        """Wait up to `seconds` for a running save, however the run has ended; not collective."""
        if self._under_way is not None:
            wait([self._under_way], seconds)

    def prune(self, begun: CheckpointEntry) -> None:
        """Before the first save, remove checkpoints that earlier starts kept and this one does not: a smaller `keep`
        makes room on a full disk. The checkpoint that the run resumes from is kept, because another that looks
        complete may be damaged."""
        if self.writes() and (removed := self._retain(begun)):
            self.records.event(PrunedEvent(step=self.progress.step, checkpoints=removed))

    def measured(self, metric: str) -> None:
        """Update `best` after a metric of the current state was measured, if the state is already saved. A checkpoint
        that was saved with a value of the metric keeps it.

        Waits for the save; if both are due in a step, a plan measures before it saves.
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
        """Store a late metric on the first rank; return True if the checkpoint is the best so far."""
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
        """Save the weights alone, for publishing. Raises StorageFailed."""
        begin = time.perf_counter()
        self.settle(raises=False)
        if not self.writes():
            return
        final = self.folder.model_path(self.progress.step)
        tensors, said = self.state.weights()
        state = {name: value for name, value in self._described().items() if name not in OF_FULL_STATES}
        self.transaction.save(final, tensors, {**state, **said}, ("model",))
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
        # A run killed after the save resumes after this step, so records that are missing now would stay missing.
        self.records.settle(job.step)
        pointers = self._pointers(job)
        try:
            self.transaction.save(job.final, tensors, job.state, pointers, job.files)
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
        """Write a save in the thread: collectives use their own group, one save at a time."""
        try:
            outcome.set_result(self._write(job, staged.result()))
        except BaseException as error:  # raised again by whoever waits for the outcome
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
        """Return True if one value of the metric of `best` is better than another."""
        return value > before if self.highest else value < before

    def _best_before(self, final: Path) -> float | None:
        """Return the metric of the checkpoint that `best` names; of the next best if `final` replaces that
        checkpoint."""
        entry = self.folder.pointed("best")
        if entry is not None and entry.path == final and self.best:
            entry = self.folder.best_of(self.best, highest=self.highest, besides=entry.name)
        return entry.state().get("metrics", {}).get(self.best) if entry else None

    def _described(self) -> dict[str, Any]:
        begun = {"begun_from": self.begun_from} if self.begun_from else {}
        # A run killed after the save resumes after this step and does not measure it again, so unwritten records are
        # stored too.
        return {**self.state.described(), "made_by": self.written_by, **begun, **self.records.unwritten()}


@define(eq=False)
class SaveJob:
    """Save under way. began: when it was requested; blocked: seconds that training stood still. files: non-tensor
    files, on the first rank."""

    node: str
    step: int
    final: Path
    state: dict[str, Any]
    began: float
    blocked: float | None = None
    files: dict[str, bytes] = field(factory=dict)
