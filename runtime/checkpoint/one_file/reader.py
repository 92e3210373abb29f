"""Reads a checkpoint of one file into tensors of any layout: every rank maps the file and copies its own pieces.

Which pieces these are torch's distributed checkpoint finds out, as it does for its own format, shards of shards too.
"""

from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from xtrain.runtime.checkpoint.sidecar import TENSORS


def mapped(folder: Path) -> dict[str, Tensor]:
    """Name → tensor whose content is read from the disk when it is asked for. Raises OSError."""
    try:
        found = torch.load(folder / TENSORS, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError, EOFError, UnpicklingError) as error:
        raise OSError(f"{folder / TENSORS} cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(found, dict) or not all(isinstance(each, Tensor) for each in found.values()):
        raise OSError(f"{folder / TENSORS} holds something else than tensors by name")
    return found


class FileReader(StorageReader):
    """One piece a tensor: the whole of it."""

    def __init__(self, folder: Path) -> None:
        self._tensors = mapped(folder)

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **rest: Any) -> Metadata:
        return Metadata(state_dict_metadata={name: _whole(tensor) for name, tensor in self._tensors.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **rest: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            assert item.type is LoadItemType.TENSOR
            piece = self._tensors[cast(MetadataIndex, item.storage_index).fqn]
            for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                piece = piece.narrow(dim, offset, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(piece)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return (Path(checkpoint_id) / TENSORS).is_file()


def _whole(tensor: Tensor) -> TensorStorageMetadata:
    origin = torch.Size([0] * tensor.dim())
    return TensorStorageMetadata(
        properties=TensorProperties.create_from_tensor(tensor),
        size=tensor.size(),
        chunks=[ChunkStorageMetadata(offsets=origin, sizes=tensor.size())],
    )
