"""Several adapters over one model: rows of a microbatch go through that of their task.

The rows of a task lie side by side, so that what it takes of activations are views, and gradients of its adapter are of
its own rows alone.
Shapes: B rows, S positions, D inputs, F outputs, N rows of experts, T tasks, L experts of this rank.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from attrs import frozen
from torch import Tensor, nn

from xtrain.runtime.models.head_product import HeadFactors
from xtrain.runtime.models.layers import Linear
from xtrain.runtime.models.task_routing import ChangesProduct, TaskRouting
from xtrain.runtime.parallel.tensor import local


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
