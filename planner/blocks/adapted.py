"""A decoder block beside whose matrices an adapter has others, which are trained in their place."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from ..architecture import Architecture, BlockParameter
from ..costs.op_trace import TracedTensor
from .block import Chain

if TYPE_CHECKING:
    from ..costs.block_trace import Tracer


@frozen
class AdaptedMatrix:
    """A matrix of a block, by the name of its parameter, and what an adapter adds to its product. The module that
    `torch_module` names puts that into the modules of a rank."""

    name: str

    @classmethod
    def torch_module(cls) -> str:
        """The module that ranks import for it: `…_torch`, beside its own."""
        return f"{cls.__module__}_torch"

    def parameters(self, matrix: BlockParameter) -> Iterator[BlockParameter]:
        """What it has beside the matrix, in the order in which modules register them."""
        raise NotImplementedError

    def trace(
        self,
        on: "Tracer",
        x: TracedTensor,
        out: TracedTensor,
        tokens: int,
        *,
        parts: int = 1,
        added: int | None = None,
    ) -> TracedTensor:
        """Write down what is added to `out`, the product of the matrix and `x`, of so many tokens; the sum. Of routed
        experts that are computed one after the other, x and out are those of one of so many `parts`; added: as of
        `OpTrace.linear`."""
        raise NotImplementedError


@frozen
class AdaptedBlock(Chain):
    """A block, which is its only piece, with an adapter of some of its matrices."""

    matrices: tuple[AdaptedMatrix, ...]

    def parameters(self, arch: Architecture) -> Iterator[BlockParameter]:
        """Those of an adapter stand behind those of the module that they are added to."""
        own = list(super().parameters(arch))
        by_name = {parameter.name: parameter for parameter in own}
        ends = {parameter.owner: parameter.name for parameter in own}
        behind: dict[str, list[BlockParameter]] = {}
        for matrix in self.matrices:
            parameter = by_name[matrix.name]
            behind.setdefault(ends[parameter.owner], []).extend(matrix.parameters(parameter))
        for parameter in own:
            yield parameter
            yield from behind.get(parameter.name, ())

    def trace(self, on: "Tracer", x: TracedTensor) -> TracedTensor:
        return super().trace(evolve(on, adapted={each.name: each for each in self.matrices}), x)


def adapted_matrices(arch: Architecture) -> Iterator[tuple[int, AdaptedMatrix]]:
    """(layer, matrix) of all that an adapter is of, in the order of the model."""
    found = {layer: kind.block for kind in arch.kinds for layer in kind.layers}
    for layer, block in sorted(found.items()):
        if isinstance(block, AdaptedBlock):
            yield from ((layer, matrix) for matrix in block.matrices)
