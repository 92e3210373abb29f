"""Which matrices of a model an adapter is of."""

from collections.abc import Iterator, Sequence, Set
from typing import TYPE_CHECKING, Final

from xtrain.planner.architecture import HEAD, Architecture, BlockParameter
from xtrain.planner.model.frozen import fits_part

if TYPE_CHECKING:
    from xtrain.planner.blocks.block import BlockPiece

ALL_LINEAR: Final = "all_linear"


def matrices_of(block: "BlockPiece", arch: Architecture) -> Iterator[BlockParameter]:
    """The matrices of a block that an adapter can be of; those of a router are not among them."""
    for layer in block.layers():
        if layer.adapts:
            yield from (each for each in layer.parameters(arch) if each.is_matrix and not each.router)


def all_matrices(arch: Architecture) -> list[tuple[int | None, BlockParameter]]:
    """(layer, matrix) of all of a model that an adapter can be of, in its order; the head is in no layer."""
    found = {layer: tuple(matrices_of(kind.block, arch)) for kind in arch.base.kinds for layer in kind.layers}
    of_blocks = [(layer, matrix) for layer in sorted(found) for matrix in found[layer]]
    return [*of_blocks, *([(None, arch.head_parameter)] if arch.head == "vocabulary" else [])]


def name_of(layer: int | None, name: str) -> str:
    """In the model what is `name` in the block of a layer; None: it is in none."""
    return name if layer is None else f"layers.{layer}.{name}"


def is_target(pattern: str, layer: int | None, matrix: BlockParameter) -> bool:
    """Whether a pattern means a matrix of the block of a layer. Of routed experts only one that names their module
    does, and the head only one that names it."""
    if layer is None:
        return pattern == HEAD
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
    dense = {name_of(layer, each.name) for layer, each in all_matrices(arch) if layer is not None and not each.expert}
    if dense and dense <= names:
        return ALL_LINEAR, *patterns_of(arch, names - dense)
    return patterns_of(arch, names)


def patterns_of(arch: Architecture, names: Set[str]) -> tuple[str, ...]:
    """The same, each matrix by its own name."""
    layers: dict[str, list[int]] = {}
    every: dict[str, list[int]] = {}
    for layer, matrix in all_matrices(arch):
        if layer is not None:
            every.setdefault(matrix.name, []).append(layer)
            if name_of(layer, matrix.name) in names:
                layers.setdefault(matrix.name, []).append(layer)
    found: list[str] = []
    for name, own in layers.items():
        matrix = name.removesuffix(".weight")
        found += [matrix] if own == every[name] else [f"layers.{each}.{matrix}" for each in _ranges(own)]
    if f"{HEAD}.weight" in names:
        found.append(HEAD)
    return tuple(found)


def _ranges(numbers: Sequence[int]) -> Iterator[str]:
    """`0-3`, `7`: of numbers in order."""
    first = last = numbers[0]
    for number in (*numbers[1:], numbers[-1] + 2):
        if number != last + 1:
            yield f"{first}-{last}" if last > first else str(first)
            first = number
        last = number
