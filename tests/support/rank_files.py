"""What DeepSpeed's compiled reading and writing of files does, in Python, for machines that cannot compile it."""

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from rank_mutations import mutation
from torch import Tensor


class PlainFiles:
    """An `aio_handle` that has done everything once it returns."""

    locked: ClassVar[list[tuple[int, int]]] = []

    def __init__(self, **_: Any) -> None:
        self._ended = 0

    def new_cpu_locked_tensor(self, count: int, like: Tensor) -> Tensor:
        found = torch.full((count,), torch.nan, dtype=like.dtype)
        self.locked.append((found.data_ptr(), found.data_ptr() + found.nbytes))
        return found

    def free_cpu_locked_tensor(self, tensor: Tensor) -> bool:
        return True

    def is_pinned(self, tensor: Tensor) -> bool:
        return any(first <= tensor.data_ptr() < end for first, end in self.locked)

    def async_pread(self, tensor: Tensor, path: str, offset: int) -> int:
        with Path(path).open("rb") as file:
            file.seek(offset)
            assert file.readinto(_bytes(tensor)) == tensor.nbytes, path
        self._ended += 1
        return 0

    def async_pwrite(self, tensor: Tensor, path: str, offset: int) -> int:
        assert offset == 0 and self.is_pinned(tensor) and tensor.nbytes % 1024 == 0
        Path(path).write_bytes(_bytes(tensor))
        self._ended += 1
        return 0

    def wait(self) -> int:
        ended, self._ended = self._ended, 0
        return ended


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().view(torch.uint8).numpy().data


@mutation
def plain_files() -> None:
    """No fault: files are read and written by `PlainFiles`."""
    accelerator: Any = import_module("deepspeed.accelerator").get_accelerator()
    builder: Any = type(accelerator.create_op_builder("AsyncIOBuilder"))
    builder.is_compatible = lambda self, verbose=False: True
    builder.load = lambda self, verbose=False: SimpleNamespace(aio_handle=PlainFiles)
