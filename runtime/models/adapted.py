"""Putting an adapter into the modules of a block."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from ...planner.architecture import Architecture, BlockParameter, ParameterSpec
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


Decompose = Callable[[Any, Tensor, torch.dtype], dict[str, Tensor]]
"""(matrix, its whole weight, the format of what is kept) → the first values of all that it has beside that, whole and
by name in the block."""
Begun = Callable[[Any, Mapping[str, Tensor]], Tensor]
"""(matrix, what it has beside its weight by name in the block) → the part of the weight that it has begun with."""

_DECOMPOSES: Final[dict[type[AdaptedMatrix], Decompose]] = {}
_BEGUN: Final[dict[type[AdaptedMatrix], Begun]] = {}


def decomposes(matrix: type[AdaptedMatrix], begun: Begun) -> Callable[[Decompose], Decompose]:
    """Registers what makes the first values of one class of adapters of the matrix itself, and what that leaves out of
    the matrix."""

    def add(function: Decompose) -> Decompose:
        _DECOMPOSES[matrix], _BEGUN[matrix] = function, begun
        return function

    return add


def decomposed(matrix: AdaptedMatrix, weight: Tensor, format: torch.dtype) -> dict[str, Tensor]:
    """As of `Decompose`."""
    importlib.import_module(type(matrix).torch_module())
    return _DECOMPOSES[type(matrix)](matrix, weight, format)


def begun_part(matrix: AdaptedMatrix, beside: Mapping[str, Tensor]) -> Tensor:
    """As of `Begun`."""
    importlib.import_module(type(matrix).torch_module())
    return _BEGUN[type(matrix)](matrix, beside)


Write = Callable[[Any, Any, Mapping[str, Tensor]], dict[str, Tensor]]
"""(matrix, the same of the adapter of `as_written`, what the first has beside its weight by name in the block) → what
the second has of that."""

_WRITES: Final[dict[type[AdaptedMatrix], Write]] = {}


def writes(matrix: type[AdaptedMatrix]) -> Callable[[Write], Write]:
    """Registers what one class of adapters becomes in files."""

    def add(function: Write) -> Write:
        _WRITES[matrix] = function
        return function

    return add


def written(matrix: AdaptedMatrix, as_written: AdaptedMatrix, beside: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As of `Write`."""
    importlib.import_module(type(matrix).torch_module())
    return _WRITES[type(matrix)](matrix, as_written, beside)


FirstValues = Callable[..., Tensor]
"""(parameter, seed=, device=, and the arguments of the adapter's node) → the whole parameter as an adapter begins."""

_FIRST_VALUES: Final[dict[type[AdaptedMatrix], FirstValues]] = {}


def draws(matrix: type[AdaptedMatrix]) -> Callable[[FirstValues], FirstValues]:
    """Registers what draws the parameters that one class of adapters has beside a matrix."""

    def add(function: FirstValues) -> FirstValues:
        _FIRST_VALUES[matrix] = function
        return function

    return add


def first_values(
    matrix: type[AdaptedMatrix], parameter: ParameterSpec, seed: int, device: torch.device, args: Mapping[str, Any]
) -> Tensor:
    """What a parameter of an adapter begins with, whole. args: of the node that gives an adapter its first values."""
    importlib.import_module(matrix.torch_module())
    return _FIRST_VALUES[matrix](parameter, seed=seed, device=device, **args)


Merge = Callable[[Any, Tensor, Mapping[str, Tensor]], Tensor]
"""(matrix, its whole weight, what it has beside that by name in the block) → the weight that computes the same. Of one
that decomposes, the weight is the rest."""

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
