"""In which form the tensors of a checkpoint lie in its folder: written as a run declares, read as they are found.

`dcp`: files of torch's distributed checkpoint, one a rank. `file`: one file of all tensors, of a run of one process.
"""

from pathlib import Path
from typing import Any, Literal

from torch.distributed.checkpoint.state_dict_loader import load

from ..models.tensors import quiet_alone
from ..parallel.collective_errors import CollectiveErrors
from . import writer
from .one_file import reader as file_reader
from .one_file import writer as file_writer
from .save_planner import CachedSavePlanner
from .sidecar import TENSORS

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

    Collective; without `collective` this process is alone. Raises OSError, or CheckpointException where a name is
    missing or has another shape.
    """
    group = collective.group if collective is not None else None
    reader = file_reader.FileReader(folder) if (folder / TENSORS).is_file() else None
    with quiet_alone():
        load(tensors, checkpoint_id=folder, storage_reader=reader, process_group=group, no_dist=group is None)
