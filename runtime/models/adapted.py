"""What the torch side of an adapter does with the matrices that it is of."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor, nn

from xtrain.planner.architecture import Architecture, BlockParameter, ParameterSpec
from xtrain.planner.blocks.adapted import AdaptedBlock, AdaptedMatrix
from xtrain.runtime.models.tasks import add_task, take_task
from xtrain.runtime.ops import PlanMismatch
from xtrain.runtime.parallel.axes import Axes

F = TypeVar("F", bound=Callable[..., Any])


class MatrixFunctions(Generic[F]):
    """A function for each class of adapted matrices; `@functions(LoraMatrix)` registers one. does: what it does with a
    matrix, in words."""

    def __init__(self, does: str) -> None:
        self.does, self._found = does, dict[type[AdaptedMatrix], F]()

    def __call__(self, matrix: type[AdaptedMatrix]) -> Callable[[F], F]:
        def add(function: F) -> F:
            self._found[matrix] = function
            return function

        return add

    def of(self, matrix: type[AdaptedMatrix]) -> F:
        """The function of a class, whose module is imported. Raises PlanMismatch where that has none."""
        if matrix not in self._found:
            importlib.import_module(matrix.torch_module())
        if matrix not in self._found:
            raise PlanMismatch(f"`{matrix.torch_module()}` has nothing that {self.does} a {matrix.__name__}")
        return self._found[matrix]


PutOn = Callable[[Any, nn.Module, Mapping[str, BlockParameter], Axes], None]
"""(matrix, block, the block's parameters by name, axes of the model): changes the block."""
Decompose = Callable[[Any, Tensor, torch.dtype], dict[str, Tensor]]
"""(matrix, its whole weight, the format of what is kept) → the first values of all that it has beside that, whole and
by name in the block."""
Begun = Callable[[Any, Mapping[str, Tensor]], Tensor]
"""(matrix, what it has beside its weight by name in the block) → the part of the weight that it has begun with, which
`Decompose` leaves out of the weight."""
Write = Callable[[Any, Any, Mapping[str, Tensor]], dict[str, Tensor]]
"""(matrix, the same of the adapter of `as_written`, what the first has beside its weight by name in the block) → what
the second has of that in files."""
FirstValues = Callable[..., Tensor]
"""(parameter, seed=, device=, and the arguments of the adapter's node) → the whole parameter as an adapter begins."""
Merge = Callable[[Any, Tensor, Mapping[str, Tensor]], Tensor]
"""(matrix, its whole weight, what it has beside that by name in the block) → the weight that computes the same. Of one
that decomposes, the weight is the rest."""

puts_on: Final = MatrixFunctions[PutOn]("puts into a block")
decomposes: Final = MatrixFunctions[Decompose]("decomposes")
begins_with: Final = MatrixFunctions[Begun]("says what begins")
writes: Final = MatrixFunctions[Write]("writes")
draws: Final = MatrixFunctions[FirstValues]("draws")
merges: Final = MatrixFunctions[Merge]("merges")


def put_on(module: nn.Module, block: AdaptedBlock, arch: Architecture, axes: Axes) -> None:
    """Let a block that was built without adapter have it. Raises PlanMismatch where nothing puts it on."""
    _put_all(module, block.matrices, {parameter.name: parameter for parameter in block.parameters(arch)}, axes)


def put_on_head(model: nn.Module, arch: Architecture, axes: Axes) -> None:
    """The same of the head of a vocabulary, a `Linear` of the model without weight where the embedding has that."""
    head = arch.head_parameter
    _put_all(model, arch.head_matrices, {each.name: each for each in (head, *arch.head_adapters())}, axes)


def _put_all(
    module: nn.Module, matrices: Sequence[AdaptedMatrix], known: Mapping[str, BlockParameter], axes: Axes
) -> None:
    for matrix in matrices:
        put = puts_on.of(type(matrix))
        if not matrix.task:
            put(matrix, module, known, axes)
            continue
        assert axes.tasks is not None
        path = known[matrix.name].owner
        tree = add_task(module, path, matrix.task, axes.tasks)
        put(matrix, tree, known, axes)
        take_task(module, path, matrix.task, tree)


def decomposed(matrix: AdaptedMatrix, weight: Tensor, format: torch.dtype) -> dict[str, Tensor]:
    """As of `Decompose`."""
    return decomposes.of(type(matrix))(matrix, weight, format)


def begun_part(matrix: AdaptedMatrix, beside: Mapping[str, Tensor]) -> Tensor:
    """As of `Begun`."""
    return begins_with.of(type(matrix))(matrix, beside)


def written(matrix: AdaptedMatrix, as_written: AdaptedMatrix, beside: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As of `Write`."""
    return writes.of(type(matrix))(matrix, as_written, beside)


def first_values(
    matrix: type[AdaptedMatrix], parameter: ParameterSpec, seed: int, device: torch.device, args: Mapping[str, Any]
) -> Tensor:
    """What a parameter of an adapter begins with, whole. args: of the node that gives an adapter its first values."""
    return draws.of(matrix)(parameter, seed=seed, device=device, **args)


def merged(matrix: AdaptedMatrix, weight: Tensor, beside: Mapping[str, Tensor]) -> Tensor:
    """A weight with its adapter in it, in the format of both."""
    return merges.of(type(matrix))(matrix, weight, beside)
