"""Which matrices of a model an adapter is of."""

from collections.abc import Iterator, Sequence, Set
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


def all_matrices(arch: Architecture) -> list[tuple[int, BlockParameter]]:
    """(layer, matrix) of all of a model that an adapter can be of, in its order."""
    found = {layer: tuple(matrices_of(kind.block, arch)) for kind in arch.base.kinds for layer in kind.layers}
    return [(layer, matrix) for layer in sorted(found) for matrix in found[layer]]


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


def targets_of(arch: Architecture, names: Set[str]) -> tuple[str, ...]:
    """Patterns that mean these matrices and no other. names: of parameters."""
    dense = {f"layers.{layer}.{matrix.name}" for layer, matrix in all_matrices(arch) if not matrix.expert}
    if dense and dense <= names:
        return ALL_LINEAR, *patterns_of(arch, names - dense)
    return patterns_of(arch, names)


def patterns_of(arch: Architecture, names: Set[str]) -> tuple[str, ...]:
    """The same, each matrix by its own name."""
    layers: dict[str, list[int]] = {}
    every: dict[str, list[int]] = {}
    for layer, matrix in all_matrices(arch):
        every.setdefault(matrix.name, []).append(layer)
        if f"layers.{layer}.{matrix.name}" in names:
            layers.setdefault(matrix.name, []).append(layer)
    found: list[str] = []
    for name, own in layers.items():
        matrix = name.removesuffix(".weight")
        found += [matrix] if own == every[name] else [f"layers.{each}.{matrix}" for each in _ranges(own)]
    return tuple(found)


def _ranges(numbers: Sequence[int]) -> Iterator[str]:
    """`0-3`, `7`: of numbers in order."""
    first = last = numbers[0]
    for number in (*numbers[1:], numbers[-1] + 2):
        if number != last + 1:
            yield f"{first}-{last}" if last > first else str(first)
            first = number
        last = number
