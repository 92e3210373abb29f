"""Copies of a state in host memory, each complete before the next step, into buffers that are kept."""

from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from xtrain.runtime.checkpoint.one_file.writer import alone


@define(kw_only=True, eq=False)
class Snapshots:
    """most: how many copies there may be at once. pinned: in page-locked memory, into which a GPU copies faster."""

    most: int
    pinned: bool
    _free: list[dict[str, Tensor]] = field(factory=list, init=False)
    _taken: int = field(default=0, init=False)

    def take(self, tensors: dict[str, Any]) -> dict[str, Tensor]:
        """Copy the state as it is now; it may change as soon as this returns. Raises RuntimeError over `most`."""
        if self._taken == self.most:
            raise RuntimeError(f"{self.most} copies of the state are in use, and no more are planned")
        found = self._free.pop() if self._free else {}
        if not found or not _fits(found, tensors):
            found = {name: self._like(alone(tensor)) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            found[name].copy_(alone(tensor), non_blocking=self.pinned)
        if self.pinned:
            torch.cuda.current_stream().synchronize()
        self._taken += 1
        return found

    def give_back(self, copy: dict[str, Tensor]) -> None:
        """The buffers may be written again."""
        self._free.append(copy)
        self._taken -= 1

    def _like(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=self.pinned)


def _fits(buffers: dict[str, Tensor], tensors: dict[str, Any]) -> bool:
    return buffers.keys() == tensors.keys() and all(
        buffers[name].shape == tensor.shape and buffers[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )
