"""Writes tensors of one process as one file, `state.pt`, that `torch.load(…, weights_only=True)` reads anywhere."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from xtrain.runtime.checkpoint.checksums import file_checksums
from xtrain.runtime.checkpoint.sidecar import TENSORS
from xtrain.runtime.files import durable


class _CountingFile:
    """What `torch.save` writes to; every change of a file goes through `durable`, as all others of a save do."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.error: BaseException | None = None

    def write(self, content: Any) -> int:
        if self.error is None:
            try:
                durable.append(self._fd, content)
            except BaseException as error:
                # Raised when torch is done: it would speak of a wrong position in the file instead.
                self.error = error
        return memoryview(content).nbytes

    def flush(self) -> None:
        """Nothing is held back here."""


def write_file(tensors: dict[str, Any], folder: Path) -> dict[str, str]:
    """Write name → tensor into an empty folder; name → checksum of the file, which is then on the disk.

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
    """All of a tensor of a run of one process, which has the whole of whatever is cut into shards, in memory that holds
    nothing else: `torch.save` writes what lies around a piece too."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    own = local.untyped_storage().nbytes() == local.numel() * local.element_size()
    return local if own else local.clone()
