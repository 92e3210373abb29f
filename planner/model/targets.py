"""Which matrices of a model an adapter is of."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from ..architecture import Architecture, BlockParameter
from .frozen import fits_part

if TYPE_CHECKING:
    from ..blocks.block import BlockPiece

ALL_LINEAR: Final = "all_linear"


def matrices_of(block: "BlockPiece", arch: Architecture) -> Iterator[BlockParameter]:
    """The matrices of a block that an adapter can be of; those of a router are not among them."""
    for layer in block.layers():
        if layer.adapts:
            yield from (each for each in layer.parameters(arch) if each.is_matrix and not each.router)


def is_target(pattern: str, layer: int, matrix: BlockParameter) -> bool:
    """Whether a pattern means a matrix of the block of a layer. Of routed experts only one that names their module
    does."""
    if matrix.expert and matrix.owner.rpartition(".")[2] not in pattern.split("."):
        return False
    return pattern == ALL_LINEAR or means(pattern, layer, matrix.name)


def means(pattern: str, layer: int | None, name: str) -> bool:
    """Whether a pattern is some parts of a parameter's name, one behind the other, with `*` and `0-3` as in `covers`.
    layer: whose block it is in; None: in none."""
    place = [] if layer is None else ["layers", str(layer)]
    wanted, parts = pattern.split("."), [*place, *name.removesuffix(".weight").split(".")]
    return any(all(map(fits_part, wanted, parts[start:])) for start in range(len(parts) - len(wanted) + 1))
