"""Putting an adapter into the modules of a block."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Final

from torch import Tensor, nn

from ...planner.architecture import Architecture, BlockParameter
from ...planner.blocks.adapted import AdaptedBlock, AdaptedMatrix
from ..ops import PlanMismatch
from ..parallel.axes import Axes
from .tasks import add_task, take_task

PutOn = Callable[[Any, nn.Module, Mapping[str, BlockParameter], Axes], None]
"""(matrix, block, the block's parameters by name, axes of the model): changes the block."""

_PUTS_ON: Final[dict[type[AdaptedMatrix], PutOn]] = {}


def puts_on(matrix: type[AdaptedMatrix]) -> Callable[[PutOn], PutOn]:
    """Registers what puts one class of adapters into a block."""

    def add(function: PutOn) -> PutOn:
        _PUTS_ON[matrix] = function
        return function

    return add


def put_on(module: nn.Module, block: AdaptedBlock, arch: Architecture, axes: Axes) -> None:
    """Let a block that was built without adapter have it. Raises PlanMismatch where nothing puts it on."""
    known = {parameter.name: parameter for parameter in block.parameters(arch)}
    for matrix in block.matrices:
        kind = type(matrix)
        if kind not in _PUTS_ON:
            importlib.import_module(kind.torch_module())
        if kind not in _PUTS_ON:
            raise PlanMismatch(f"`{kind.torch_module()}` puts no {kind.__name__} into a block")
        if not matrix.task:
            _PUTS_ON[kind](matrix, module, known, axes)
            continue
        assert axes.tasks is not None
        path = known[matrix.name].owner
        tree = add_task(module, path, matrix.task, axes.tasks)
        _PUTS_ON[kind](matrix, tree, known, axes)
        take_task(module, path, matrix.task, tree)


Merge = Callable[[Any, Tensor, Mapping[str, Tensor]], Tensor]
"""(matrix, its whole weight, what it has beside that by name in the block) → the weight that computes the same."""

_MERGES: Final[dict[type[AdaptedMatrix], Merge]] = {}


def merges(matrix: type[AdaptedMatrix]) -> Callable[[Merge], Merge]:
    """Registers what puts one class of adapters into the matrix itself."""

    def add(function: Merge) -> Merge:
        _MERGES[matrix] = function
        return function

    return add


def merged(matrix: AdaptedMatrix, weight: Tensor, beside: Mapping[str, Tensor]) -> Tensor:
    """A weight with its adapter in it, in the format of both."""
    importlib.import_module(type(matrix).torch_module())
    return _MERGES[type(matrix)](matrix, weight, beside)
