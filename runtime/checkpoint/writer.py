"""Writes tensors with torch's distributed checkpoint, and says of a disk what is wrong with it."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.futures import Future

from xtrain.runtime.checkpoint.checksums import file_checksums
from xtrain.runtime.checkpoint.save_planner import CachedSavePlanner
from xtrain.runtime.files import durable
from xtrain.runtime.models.tensors import quiet_alone
from xtrain.runtime.parallel.collective_errors import CollectiveErrors


class _Writer(FileSystemWriter):
    """One file a rank. What is written reaches the disk later, with its checksum."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=False, thread_count=1)

    def write_data(self, plan: Any, planner: Any) -> Future:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise _origin(error) from None


def _origin(error: BaseException) -> BaseException:
    """The error of the disk behind one of torch, which speaks of wrong positions in a file."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError):
            return found
        found = found.__cause__ or found.__context__
    return error


def write_tensors(
    tensors: dict[str, Any], folder: Path, collective: CollectiveErrors, planner: CachedSavePlanner
) -> dict[str, str]:
    """Write every rank's pieces into an empty folder that all see; name → checksum of all files, which are then on the
    disk. Collective. Raises StorageFailed on all ranks alike."""
    group = collective.group

    def write() -> None:
        # The planner has the tensors: of those that are given to `save` it would log each one by one.
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


def _settled(folder: Path, rank: int) -> dict[str, str]:
    """Checksums of the files that this rank has written, computed while the disk takes them."""
    own = [path for path in folder.iterdir() if path.name.startswith(f"__{rank}_") or (rank == 0 and _shared(path))]
    with ThreadPoolExecutor(1) as pool:
        syncing = [pool.submit(durable.sync, path) for path in own]
        sums = file_checksums(own)
        for each in syncing:
            each.result()
    return sums


def _shared(path: Path) -> bool:
    return not path.name.startswith("__")
