"""Which matrices `compute = fp8` is of: those of blocks that a `Linear` multiplies, whose widths on a rank kernels can
take."""

from collections.abc import Iterator
from math import prod

from xtrain.dsl.schema.fp8 import MULTIPLE, Fp8
from xtrain.planner.architecture import Architecture, BlockParameter
from xtrain.planner.model.targets import matrices_of, means

Layers = dict[str, tuple[int, ...]]
"""Name of a module inside a block → the layers that it is one of."""


def fp8_matrices(arch: Architecture, tp: int, fp8: Fp8) -> Layers:
    """Those that are multiplied in fp8, in the order of the model."""
    found: dict[str, list[int]] = {}
    for layer, matrix in _all(arch):
        if not matrix.expert and not is_skipped(fp8, layer, matrix) and not _uneven(matrix, tp):
            found.setdefault(matrix.owner, []).append(layer)
    return {name: tuple(layers) for name, layers in found.items()}


def uneven_matrices(arch: Architecture, tp: int, fp8: Fp8) -> dict[str, int]:
    """Those that cannot be, by their names in a block, and the width that is no multiple."""
    return {
        matrix.owner: width
        for layer, matrix in _all(arch)
        if not matrix.expert and not is_skipped(fp8, layer, matrix) and (width := _uneven(matrix, tp))
    }


def idle_patterns(arch: Architecture, fp8: Fp8) -> list[str]:
    """Patterns of `skip` that mean no matrix."""
    every = [(layer, matrix) for layer, matrix in _all(arch) if not matrix.expert]
    return [each for each in fp8.skip if not any(means(each, layer, matrix.name) for layer, matrix in every)]


def is_skipped(fp8: Fp8, layer: int, matrix: BlockParameter) -> bool:
    return any(means(pattern, layer, matrix.name) for pattern in fp8.skip)


def matrix_numbers(arch: Architecture, matrices: Layers) -> int:
    """How many numbers they have together."""
    sizes = {(layer, each.owner): prod(each.shape) for layer, each in _all(arch)}
    return sum(sizes[layer, name] for name, layers in matrices.items() for layer in layers)


def _all(arch: Architecture) -> Iterator[tuple[int, BlockParameter]]:
    found = {layer: tuple(matrices_of(kind.block, arch)) for kind in arch.kinds for layer in kind.layers}
    return ((layer, matrix) for layer in sorted(found) for matrix in found[layer] if not matrix.adapter)


def _uneven(matrix: BlockParameter, tp: int) -> int:
    """The width on a rank that is no multiple of what a kernel takes; 0: both are."""
    outputs, inputs = matrix.shape
    outputs, inputs = (
        (outputs // tp if matrix.cut == "column" else outputs),
        (inputs // tp if matrix.cut == "row" else inputs),
    )
    return next((width for width in (outputs, inputs) if width % MULTIPLE), 0)
