"""What FSDP works out for all ranks and every parameter, where one rank is traced: on 100,000 of them that would be
most of a set-up, and a third of a step."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import ceil
from typing import Any, overload

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param


class Pieces(Sequence[Tensor]):
    """As `torch.chunk` gives them, each cut where it is asked for; behind the last one they are empty."""

    def __init__(self, tensor: Tensor, number: int, dim: int) -> None:
        self._tensor, self._number, self._dim = tensor, number, dim

    def __len__(self) -> int:
        return self._number

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(self._number))]
        if not 0 <= index < self._number:
            raise IndexError(index)
        length = self._tensor.size(self._dim)
        size = ceil(length / self._number)
        start = min(index * size, length)
        return self._tensor.narrow(self._dim, start, min(size, length - start))

    def joined(self, dim: int) -> Tensor:
        """All of them, which are alike, side by side along another dim: a new tensor."""
        shape = list(self._tensor.shape)
        assert shape[self._dim] % self._number == 0, "FSDP cuts a dim behind the first one into equal pieces"
        shape[self._dim] //= self._number
        shape[dim] *= self._number
        return self._tensor.new_empty(shape)


class _JoinsPieces:
    """Stands for torch in FSDP's collectives, where pieces of a matrix that is cut behind its first dim are put beside
    each other: what goes in and what comes out is the same, without a tensor for the piece of every rank."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def chunk(self, tensor: Tensor, number: int, dim: int = 0) -> Pieces:
        return Pieces(tensor, number, dim)

    def cat(self, tensors: Sequence[Tensor], dim: int = 0, *, out: Tensor | None = None) -> Tensor:
        if not isinstance(tensors, Pieces):
            return torch.cat(tensors, dim, out=out)  # pyright: ignore[reportArgumentType]
        return tensors.joined(dim) if out is None else out


@contextmanager
def joined_pieces() -> Iterator[None]:
    """FSDP exchanges whole parameters and gradients, of which it makes no pieces."""
    module: Any = _fsdp_collectives
    with ExitStack() as stack:
        stack.callback(setattr, module, "torch", module.torch)
        module.torch = _JoinsPieces()
        yield


@contextmanager
def own_pieces() -> Iterator[None]:
    """FSDP cuts the piece of a parameter that it takes, and makes a mesh of the same two meshes once."""
    meshes: dict[tuple[int, ...], tuple[Any, DeviceMesh]] = {}
    make: Callable[[list[DeviceMesh]], DeviceMesh] | None = getattr(DeviceMesh, "_concatenate", None)

    def joined(parts: list[DeviceMesh]) -> DeviceMesh:
        assert make is not None
        key = tuple(map(id, parts))
        if key not in meshes:
            meshes[key] = parts, make(parts)
        return meshes[key][1]

    with ExitStack() as stack:
        module: Any = _fsdp_param
        stack.callback(setattr, module, "_chunk_with_empty", module._chunk_with_empty)
        module._chunk_with_empty = Pieces
        if make is not None:
            stack.callback(setattr, DeviceMesh, "_concatenate", DeviceMesh.__dict__["_concatenate"])
            DeviceMesh._concatenate = staticmethod(joined)  # pyright: ignore[reportAttributeAccessIssue]
        yield
