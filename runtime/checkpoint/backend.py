"""In which form the tensors of a checkpoint lie in its folder: written as a run declares, read as they are found.

`dcp`: files of torch's distributed checkpoint, one a rank. `file`: one file of all tensors, of a run of one process.
"""

from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader

from xtrain.runtime.checkpoint import writer
from xtrain.runtime.checkpoint.one_file import writer as file_writer
from xtrain.runtime.checkpoint.save_planner import CachedSavePlanner
from xtrain.runtime.checkpoint.shard_reader import reader_of
from xtrain.runtime.errors import StorageFailed
from xtrain.runtime.models.tensors import quiet_alone
from xtrain.runtime.parallel.collective_errors import CollectiveErrors, reason

Backend = Literal["dcp", "file"]


def write_tensors(
    backend: Backend,
    tensors: dict[str, Any],
    folder: Path,
    collective: CollectiveErrors,
    planner: CachedSavePlanner | None = None,
) -> dict[str, str]:
    """Write name → tensor into an empty folder that all ranks see; name → checksum of all files, which are then on the
    disk. Collective. Raises StorageFailed on all ranks alike.

    planner: of a run that saves again and again, which need not plan each `dcp` save anew.
    """
    if backend == "dcp":
        return writer.write_tensors(tensors, folder, collective, planner or CachedSavePlanner())
    return collective.first(lambda: file_writer.write_file(tensors, folder))


def read_tensors(tensors: dict[str, Any], folder: Path, collective: CollectiveErrors | None = None) -> None:
    """Fill name → tensor, of whatever layout, with what a checkpoint of any layout and form holds under these names.

    Collective; without `collective` this process is alone. Raises StorageFailed on all ranks alike, also where a name
    is missing or has another shape.
    """
    collective = collective or CollectiveErrors(0, 1, None)
    group, readers = collective.group, list[StorageReader]()
    collective.all(lambda: readers.append(reader_of(folder)))
    with quiet_alone():
        try:
            load(tensors, checkpoint_id=folder, storage_reader=readers[0], process_group=group, no_dist=group is None)
        except CheckpointException as error:
            causes = [cause for cause, _ in error.failures.values()]
            if any(isinstance(cause, torch.OutOfMemoryError | torch.AcceleratorError) for cause in causes):
                raise
            raise StorageFailed(f"{folder} cannot be read: {'; '.join(dict.fromkeys(map(reason, causes)))}") from error
