"""Adapters of matrices: functions that an adapter registers for its matrices, and adapters of several tasks.

The rows of a microbatch pass through the adapter of their task.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

import torch
from attrs import frozen
from torch import Tensor, nn

from xtrain.blocks.adapted import AdaptedBlock, AdaptedMatrix
from xtrain.plan.architecture import Architecture, BlockParameter, ParameterSpec
from xtrain.runtime.base.ops import PlanMismatch
from xtrain.runtime.nn.axes import Axes, local
from xtrain.runtime.nn.head_product import ChangesProduct, HeadFactors, TaskRouting
from xtrain.runtime.nn.layers import Linear


class TasksOf(nn.Module):
    """What the tasks have beside one matrix or stack of experts, by their names."""

    def put(self, task: str, module: nn.Module) -> None:
        """Not as an attribute: a task may be called as a method of modules is."""
        self._modules[task] = module

    def get(self, task: str) -> nn.Module | None:
        return self._modules.get(task)


@frozen(eq=False)
class Under:
    """The module that something is beside, and not a part of it."""

    module: Any


class TaskLinear(Linear):
    """A `Linear` whose rows go through the adapters of their tasks."""

    def __init__(self, base: Linear, routing: TaskRouting) -> None:
        super().__init__(base.in_features, base.out_features)
        self.weight, self.bias, self.partial = base.weight, base.bias, base.partial
        self.routing = routing
        self.tasks = TasksOf()

    def forward(self, input: Tensor) -> Tensor:
        scaled = self.routing.counts and any(each is not None and each.scales for each in self._adapters)
        if self.bias is None or not scaled:
            return self.routing.applied(self._adapters, input, super().forward(input))
        return self.without_bias(input) + local(self.bias, partial=self.partial)

    def without_bias(self, x_BSD: Tensor) -> Tensor:
        return self.routing.applied(self._adapters, x_BSD, super().without_bias(x_BSD))

    def factors_of(self, rows: Sequence[int], each: int) -> Iterator[HeadFactors]:
        """What adapters add to logits. rows: of each task, one behind the other; each: tokens of a row."""
        first = 0
        for place, (adapter, count) in enumerate(zip(self._adapters, rows, strict=True)):
            if adapter is not None and self.routing.takes_part(place, count):
                yield adapter.factors(first, first + count * each)
            first += count * each

    @property
    def _adapters(self) -> "list[ChangesProduct | None]":
        found: list[Any] = [self.tasks.get(name) for name in self.routing.names]
        return found


class TaskPlace(Linear):
    """As wide as a `TaskLinear`, which is `under` it: what a task has beside that is put in its place."""

    def __init__(self, under: nn.Module) -> None:
        assert isinstance(under, TaskLinear)
        super().__init__(under.in_features, under.out_features)
        self.under = Under(under)


class ExpertStacks(nn.Module):
    """Experts side by side; where there are tasks, what each of them has beside."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks: TasksOf | None = None
        self.routing: TaskRouting | None = None


class TaskExperts(nn.Module):
    """What a task has beside experts: its parameters, and as `Experts.adapters` what it adds to their products.

    factor: what the scale of adapters is multiplied with, in a place for larger ones. under: the experts.
    """

    factor = 1.0

    def __init__(self, under: ExpertStacks) -> None:
        super().__init__()
        self.under = Under(under)
        self.adapters: dict[str, Callable[[], Any]] = {}


def add_task(block: nn.Module, path: str, task: str, routing: TaskRouting) -> nn.Module:
    """Where an adapter finds a module of its own in the place of that of a block: a tree of modules with it at `path`.

    What is put there is that of the task; `take_task` takes it into the block.
    """
    base = block.get_submodule(path)
    above, _, own = path.rpartition(".")
    if isinstance(base, ExpertStacks):
        if base.tasks is None:
            base.tasks, base.routing = TasksOf(), routing
        inner: nn.Module = base.tasks.get(task) or TaskExperts(base)
        base.tasks.put(task, inner)
    else:
        assert isinstance(base, Linear)
        if not isinstance(base, TaskLinear):
            setattr(block.get_submodule(above), own, TaskLinear(base, routing))
        inner = TaskPlace(block.get_submodule(path))
    for part in reversed(path.split(".")):
        outer = nn.Module()
        outer.add_module(part, inner)
        inner = outer
    return inner


def take_task(block: nn.Module, path: str, task: str, tree: nn.Module) -> None:
    """Put what an adapter has put into the tree of `add_task` into the block, without a matrix of its own."""
    base, found = block.get_submodule(path), tree.get_submodule(path)
    if isinstance(base, TaskLinear):
        found.register_parameter("weight", None)
        base.tasks.put(task, found)


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
