"""How a block is put together: pieces with parameters, one behind the other, side by side, around a residual stream.

A family composes its block of them. The inventory, the cost and the modules of the runtime follow from that one tree.
Every piece takes activations [tokens, dim], and gives as many.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Self

from attrs import frozen

from ..architecture import Architecture, BlockParameter
from ..costs.op_trace import TracedTensor

if TYPE_CHECKING:
    from ..costs.block_trace import Tracer


class BlockPiece:
    """A part of a block, or all of it. Two with equal settings compute the same with the same parameters."""

    def layers(self) -> "Iterator[Layer]":
        """The pieces with a name inside it, in the order in which modules are registered."""
        raise NotImplementedError

    def trace(self, on: "Tracer", x: TracedTensor) -> TracedTensor:
        """Write down what it makes of `x`, keeps and sends; the result."""
        raise NotImplementedError

    def parameters(self, arch: Architecture) -> Iterator[BlockParameter]:
        """In the order in which modules register them."""
        for layer in self.layers():
            yield from layer.parameters(arch)

    def buffers(self, arch: Architecture) -> dict[str, list[int]]:
        """Name → shape of the tensors beside parameters that a checkpoint has."""
        return {name: shape for layer in self.layers() for name, shape in layer.buffers(arch).items()}


@frozen
class Layer(BlockPiece):
    """A piece that is a module, under its name. `runtime/models/block.py` builds those of this folder; a piece that a
    family defines itself is built by the module that `torch_module` names."""

    name: str

    @classmethod
    def torch_module(cls) -> str:
        """The module that ranks import for it: `…_torch`, beside its own."""
        return f"{cls.__module__}_torch"

    def layers(self) -> "Iterator[Layer]":
        yield self

    def parameters(self, arch: Architecture) -> Iterator[BlockParameter]:
        raise NotImplementedError

    def buffers(self, arch: Architecture) -> dict[str, list[int]]:
        return {}


@frozen
class Chain(BlockPiece):
    """Pieces one behind the other."""

    pieces: tuple[BlockPiece, ...]

    @classmethod
    def of(cls, *pieces: BlockPiece) -> Self:
        return cls(pieces)

    def layers(self) -> Iterator[Layer]:
        for piece in self.pieces:
            yield from piece.layers()

    def trace(self, on: "Tracer", x: TracedTensor) -> TracedTensor:
        for piece in self.pieces:
            x = piece.trace(on, x)
        return x


@frozen
class Residual(Chain):
    """x + what the pieces, one behind the other, make of x."""

    def trace(self, on: "Tracer", x: TracedTensor) -> TracedTensor:
        return on.ops.add(x, super().trace(on, x))


@frozen
class Sum(Chain):
    """The sum of what each piece makes of x."""

    def trace(self, on: "Tracer", x: TracedTensor) -> TracedTensor:
        first, *others = self.pieces
        total = first.trace(on, x)
        for piece in others:
            total = on.ops.add(total, piece.trace(on, x))
        return total
