"""Writing of a checkpoint: planned pieces, files with checksums, and a transaction of all ranks.

Either all ranks succeed, or all raise the same error.
"""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from attrs import field, frozen
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.futures import Future

from xtrain.plan.checkpoints import Pointer
from xtrain.runtime.base import files as durable
from xtrain.runtime.base.mesh import CollectiveErrors
from xtrain.runtime.nn.weights import quiet_alone
from xtrain.runtime.store.checkpoints import TENSORS, CheckpointEntry, Publisher, file_checksums, partial_of

# Placeholder for the plan of a rank that has not changed.
UNCHANGED = SavePlan([], usable=False)


@frozen(eq=False)
class _Planned:
    """Plans of the last save: proposed by this rank, final from the first rank, and on the first rank the metadata."""

    proposed: SavePlan
    final: SavePlan
    metadata: Metadata | None


class CachedSavePlanner(DefaultSavePlanner):
    """Save planner that reuses the last plan. The first rank divides replicated tensors among the ranks and checks that
    the pieces are whole tensors; while names, shapes and placements are unchanged on all ranks, so is the plan, and
    ranks send nothing.

    torch keeps such a cache in class variables: after a save that failed on a few ranks, the caches differ. This cache
    is from a save that succeeded on all ranks, or is empty on all.
    """

    def __init__(self) -> None:
        super().__init__(flatten_sharded_tensors=False)
        self._last: _Planned | None = None
        self._again = False
        self._metadata: Metadata | None = None
        self._proposed = self._final = UNCHANGED

    def begin(self, tensors: dict[str, Any], collective: CollectiveErrors) -> None:
        """Prepare a save of `tensors`. Collective."""
        super().set_up_planner(tensors, is_coordinator=collective.rank == 0)
        self._proposed = super().create_local_plan()
        known = self._last is not None and self._last.proposed == self._proposed
        self._again = all(collective.all(lambda: known))

    def end(self, *, saved: bool) -> None:
        """Finish a save. saved: it succeeded; the same on all ranks."""
        self._last = _Planned(self._proposed, self._final, self._metadata) if saved else None
        self.state_dict = {}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Do nothing: `begin` has set the tensors."""

    def create_local_plan(self) -> SavePlan:
        return UNCHANGED if self._again else self._proposed

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        if self._again:
            assert self._metadata is not None
            return all_plans, self._metadata
        plans, self._metadata = super().create_global_plan(all_plans)
        return plans, self._metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        if not self._again:
            self._final = new_plan
        return self._final


class _Writer(FileSystemWriter):
    """Writer of one file a rank, which is synced later, with its checksum."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=False, thread_count=1)

    def write_data(self, plan: Any, planner: Any) -> Future:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise _origin(error) from None


def _origin(error: BaseException) -> BaseException:
    """Return the disk's error in the chain of a torch error, which only reports a wrong file position."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return error


def _settled(folder: Path, rank: int) -> dict[str, str]:
    """Sync the files of this rank; return their checksums, computed meanwhile."""
    own = [
        path
        for path in folder.iterdir()
        if path.name.startswith(f"__{rank}_") or (rank == 0 and not path.name.startswith("__"))
    ]
    with ThreadPoolExecutor(1) as pool:
        syncing = [pool.submit(durable.sync, path) for path in own]
        sums = file_checksums(own)
        for sync in syncing:
            sync.result()
    return sums


class _CountingFile:
    """File object for `torch.save` that writes through `durable`, as all other files of a save."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.error: BaseException | None = None

    def write(self, content: Any) -> int:
        if self.error is None:
            try:
                durable.append(self._fd, content)
            except BaseException as error:
                # Raised after torch is done: torch would report a wrong file position instead.
                self.error = error
        return memoryview(content).nbytes

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""


def write_file(tensors: dict[str, Any], folder: Path) -> dict[str, str]:
    """Write name → tensor into an empty folder; return name → checksum of the synced file.

    Raises OSError.
    """
    path = folder / TENSORS
    fd = durable.create(path)
    try:
        file = _CountingFile(fd)
        torch.save({name: alone(tensor) for name, tensor in tensors.items()}, file)  # pyright: ignore[reportArgumentType]
        if file.error is not None:
            raise file.error
    finally:
        os.close(fd)
    durable.sync(path)
    return file_checksums([path])


def alone(tensor: Tensor) -> Tensor:
    """Return a whole tensor of a single-process run in storage of its own: `torch.save` writes the whole storage of a
    view."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    own = local.untyped_storage().nbytes() == local.numel() * local.element_size()
    return local if own else local.clone()


Backend = Literal["dcp", "file"]


def write_tensors(
    backend: Backend,
    tensors: dict[str, Any],
    folder: Path,
    collective: CollectiveErrors,
    planner: CachedSavePlanner | None = None,
) -> dict[str, str]:
    """Write name → tensor into an empty folder that all ranks see; return name → checksum of all files, which are
    synced. Collective. Raises StorageFailed on all ranks alike.

    planner: reuses plans of earlier `dcp` saves.
    """
    if backend == "file":
        return collective.first(lambda: write_file(tensors, folder))
    group, planner = collective.group, planner or CachedSavePlanner()

    def write() -> None:
        # The planner has the tensors: `save` would log each tensor that it is given.
        save({}, storage_writer=_Writer(folder), planner=planner, process_group=group, no_dist=group is None)

    saved = False
    with quiet_alone():
        planner.begin(tensors, collective)
        try:
            collective.all(write)
            saved = True
        finally:
            planner.end(saved=saved)
    parts = collective.all(lambda: _settled(folder, collective.rank))
    return {name: checksum for part in parts for name, checksum in part.items()}


@frozen(kw_only=True, eq=False)
class Transaction:
    """Save of a checkpoint by all ranks. keep: see `Publisher.retain`."""

    publisher: Publisher
    collective: CollectiveErrors
    keep: int | None
    backend: Backend = "dcp"
    _planner: CachedSavePlanner = field(factory=CachedSavePlanner, init=False)

    def save(
        self,
        final: Path,
        tensors: dict[str, Any],
        state: dict[str, Any],
        pointers: tuple[Pointer, ...],
        files: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        """Save `tensors`, and on the first rank `files`, as `final`; on return it is durable and published. Collective.

        Raises StorageFailed on all ranks alike; the files written so far are then removed as far as the disk allows.
        """
        collective, publisher = self.collective, self.publisher
        try:
            collective.first(lambda: publisher.begin(final))
            checksums = write_tensors(self.backend, tensors, partial_of(final), collective, self._planner)
            collective.first(
                lambda: publisher.publish(final, state, checksums | _written(files, partial_of(final)), pointers)
            )
        except BaseException:
            if collective.rank == 0:
                with suppress(OSError):
                    publisher.abandon(final)
            raise

    def retain(self, *, begun: CheckpointEntry | None = None) -> list[str]:
        """Remove old checkpoints except the one that the run resumes from (`begun`); return the removed names.
        Collective.

        Raises StorageFailed on all ranks alike.
        """
        return self.collective.first(lambda: [path.name for path in self.publisher.retain(self.keep, begun=begun)])


def _written(files: Mapping[str, bytes], folder: Path) -> dict[str, str]:
    """Write and sync files; return name → checksum. Raises OSError."""
    for name, content in files.items():
        durable.write(folder / name, content)
    return file_checksums(folder / name for name in files)
