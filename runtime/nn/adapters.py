"""Adapters of matrices: functions that an adapter registers for its matrices, and adapters of several tasks.

The rows of a microbatch pass through the adapter of their task.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

import torch
from attrs import frozen
from torch import Tensor, nn

from xtrain.blocks.adapted import AdaptedBlock, AdaptedMatrix, head_matrices
from xtrain.plan.architecture import Architecture, BlockParameter, ParameterSpec
from xtrain.runtime.base.ops import PlanMismatch
from xtrain.runtime.nn.axes import Axes, local
from xtrain.runtime.nn.head_product import ChangesProduct, HeadFactors, TaskRouting
from xtrain.runtime.nn.layers import Linear


class TasksOf(nn.Module):
    """Modules of the tasks at one matrix or stack of experts, by task."""

    def put(self, task: str, module: nn.Module) -> None:
        """Register a module; not as an attribute, because a task may have the name of a module's method."""
        self._modules[task] = module

    def get(self, task: str) -> nn.Module | None:
        return self._modules.get(task)


@frozen(eq=False)
class Under:
    """Reference to the module that a task's module belongs to, without registering it as a submodule."""

    module: Any


class TaskLinear(Linear):
    """A `Linear` whose rows go through the adapters of their tasks."""

    def __init__(self, base: Linear, routing: TaskRouting) -> None:
        super().__init__(base.in_features, base.out_features)
        self.weight, self.bias, self.partial = base.weight, base.bias, base.partial
        self.routing = routing
        self.tasks = TasksOf()

    def forward(self, input: Tensor) -> Tensor:
        scaled = self.routing.counts and any(adapter is not None and adapter.scales for adapter in self._adapters)
        if self.bias is None or not scaled:
            return self.routing.applied(self._adapters, input, super().forward(input))
        return self.without_bias(input) + local(self.bias, partial=self.partial)

    def without_bias(self, x_BSD: Tensor) -> Tensor:
        return self.routing.applied(self._adapters, x_BSD, super().without_bias(x_BSD))

    def factors_of(self, rows: Sequence[int], each: int) -> Iterator[HeadFactors]:
        """Yield the adapters' summands of logits. rows: of each task, in order; each: tokens per row."""
        first = 0
        for place, (adapter, count) in enumerate(zip(self._adapters, rows, strict=True)):
            if adapter is not None and self.routing.takes_part(place, count):
                yield adapter.factors(first, first + count * each)
            first += count * each

    @property
    def _adapters(self) -> "list[ChangesProduct | None]":
        adapters: list[Any] = [self.tasks.get(name) for name in self.routing.names]
        return adapters


class TaskPlace(Linear):
    """Placeholder of the size of the `TaskLinear` `under` it, which a task's adapter replaces."""

    def __init__(self, under: nn.Module) -> None:
        assert isinstance(under, TaskLinear)
        super().__init__(under.in_features, under.out_features)
        self.under = Under(under)


class ExpertStacks(nn.Module):
    """Experts in stacks, with the modules of tasks if there are any."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks: TasksOf | None = None
        self.routing: TaskRouting | None = None


class TaskExperts(nn.Module):
    """A task's adapter of experts: its parameters, and summands of products as in `Experts.adapters`.

    factor: multiplies the scale of adapters, in a place for larger ones. under: the experts.
    """

    factor = 1.0

    def __init__(self, under: ExpertStacks) -> None:
        super().__init__()
        self.under = Under(under)
        self.adapters: dict[str, Callable[[], Any]] = {}


def add_task(block: nn.Module, path: str, task: str, routing: TaskRouting) -> nn.Module:
    """Return a tree of modules with a placeholder at `path`, in which an adapter finds a module of its own instead of
    the block's.

    The adapter's module there belongs to the task; `take_task` moves it into the block.
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
    """Move a task's module from the tree of `add_task` into the block, without a weight of its own."""
    base, adapter = block.get_submodule(path), tree.get_submodule(path)
    if isinstance(base, TaskLinear):
        adapter.register_parameter("weight", None)
        base.tasks.put(task, adapter)


F = TypeVar("F", bound=Callable[..., Any])


class MatrixFunctions(Generic[F]):
    """Registry of a function for each class of adapted matrices; `@functions(LoraMatrix)` registers one. does: its verb
    in messages."""

    def __init__(self, does: str) -> None:
        self.does, self._found = does, dict[type[AdaptedMatrix], F]()

    def __call__(self, matrix: type[AdaptedMatrix]) -> Callable[[F], F]:
        def register(function: F) -> F:
            self._found[matrix] = function
            return function

        return register

    def of(self, matrix: type[AdaptedMatrix]) -> F:
        """Return the function of a class after importing its module. Raises PlanMismatch without one."""
        if matrix not in self._found:
            importlib.import_module(matrix.torch_module())
        if matrix not in self._found:
            raise PlanMismatch(f"`{matrix.torch_module()}` has nothing that {self.does} a {matrix.__name__}")
        return self._found[matrix]


PutOn = Callable[[Any, nn.Module, Mapping[str, BlockParameter], Axes], None]
"""(matrix, block, the block's parameters by name, axes of the model): changes the block."""
Decompose = Callable[[Any, Tensor, torch.dtype], dict[str, Tensor]]
"""(matrix, its whole weight, format of the adapter's parameters) → initial values of the adapter's parameters, whole
and by name in the block."""
Begun = Callable[[Any, Mapping[str, Tensor]], Tensor]
"""(matrix, the adapter's parameters by name in the block) → the initial part of the weight, which `Decompose` leaves
out of the weight."""
Write = Callable[[Any, Any, Mapping[str, Tensor]], dict[str, Tensor]]
"""(matrix, the same matrix in the adapter of `as_written`, the first one's parameters by name in the block) → the
second one's parameters in files."""
FirstValues = Callable[..., Tensor]
"""(parameter, seed=, device=, and the arguments of the adapter's node) → the whole initial parameter."""
Merge = Callable[[Any, Tensor, Mapping[str, Tensor]], Tensor]
"""(matrix, its whole weight, the adapter's parameters by name in the block) → the merged weight. For an adapter that
decomposes, the given weight is the remainder."""

puts_on: Final = MatrixFunctions[PutOn]("puts into a block")
decomposes: Final = MatrixFunctions[Decompose]("decomposes")
begins_with: Final = MatrixFunctions[Begun]("says what begins")
writes: Final = MatrixFunctions[Write]("writes")
draws: Final = MatrixFunctions[FirstValues]("draws")
merges: Final = MatrixFunctions[Merge]("merges")


def put_on(module: nn.Module, block: AdaptedBlock, arch: Architecture, axes: Axes) -> None:
    """Put an adapter on a block that was built without one. Raises PlanMismatch if none is registered."""
    _put_all(module, block.matrices, {parameter.name: parameter for parameter in block.parameters(arch)}, axes)


def put_on_head(model: nn.Module, arch: Architecture, axes: Axes) -> None:
    """Put an adapter on the vocabulary head, a `Linear` of the model without weight if it shares the embedding's."""
    head = arch.head_parameter
    _put_all(model, head_matrices(arch), {p.name: p for p in (head, *arch.head_adapters())}, axes)


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
    """Decompose a weight; see `Decompose`."""
    return decomposes.of(type(matrix))(matrix, weight, format)


def begun_part(matrix: AdaptedMatrix, beside: Mapping[str, Tensor]) -> Tensor:
    """Return the initial part of a weight; see `Begun`."""
    return begins_with.of(type(matrix))(matrix, beside)


def written(matrix: AdaptedMatrix, as_written: AdaptedMatrix, beside: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert an adapter's parameters for files; see `Write`."""
    return writes.of(type(matrix))(matrix, as_written, beside)


def first_values(
    matrix: type[AdaptedMatrix], parameter: ParameterSpec, seed: int, device: torch.device, args: Mapping[str, Any]
) -> Tensor:
    """Return the whole initial value of an adapter's parameter. args: of the node that initializes the adapter."""
    return draws.of(matrix)(parameter, seed=seed, device=device, **args)


def merged(matrix: AdaptedMatrix, weight: Tensor, beside: Mapping[str, Tensor]) -> Tensor:
    """Return a weight merged with its adapter, in the format of both."""
    return merges.of(type(matrix))(matrix, weight, beside)
