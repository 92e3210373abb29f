"""Several adapters over one model: rows of a microbatch go through that of their task.

The rows of a task lie side by side, so that what it takes of activations are views, and gradients of its adapter are of
its own rows alone.
Shapes: B rows, S positions, D inputs, F outputs, N rows of experts, T tasks, L experts of this rank.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from attrs import define, frozen
from torch import Tensor, nn

from ..parallel.tensor import local
from .head_product import HeadFactors
from .layers import Linear


class ChangesProduct(Protocol):
    """What an adapter puts in the place of a `Linear`. scales: it changes the product without the bias."""

    scales: bool

    def applied(self, x_BSD: Tensor, out_BSF: Tensor) -> Tensor:
        """[B, S, F]: the product of the matrix, with what it adds."""
        ...

    def factors(self, first: int, end: int) -> HeadFactors:
        """What it adds to logits, of tokens from `first` to before `end`."""
        ...


@define(eq=False)
class TaskRouting:
    """Which rows go through which adapter; one object for all modules of a model.

    names: of the tasks. of_dataset: the place among them of each dataset that is trained on. whole: that of all rows
    of batches whose datasets are not told apart; None: these rows go through no adapter. counts: of the rows that a
    block computes now, how many are of each task; empty: they go through no adapter. part: the places of the tasks
    that take part in a backward, with or without rows on this rank; None: all.
    """

    names: tuple[str, ...]
    of_dataset: tuple[int, ...] = ()
    whole: int | None = None
    counts: tuple[int, ...] = ()
    part: frozenset[int] | None = None

    def of_rows(self, datasets: Sequence[int] | None, rows: int) -> tuple[int, ...]:
        """How many rows of a microbatch are of each task. datasets: numbers of the rows' datasets, if they are told
        apart."""
        if datasets is not None:
            places = [self.of_dataset[number] for number in datasets]
            assert places == sorted(places), "rows of a task lie side by side"
            return tuple(places.count(place) for place in range(len(self.names)))
        return () if self.whole is None else tuple(rows * (place == self.whole) for place in range(len(self.names)))

    @contextmanager
    def all_of(self, task: str | None) -> Iterator[None]:
        """Meanwhile all rows go through the adapter of a task; None: through none."""
        before, self.whole = self.whole, None if task is None else self.names.index(task)
        try:
            yield
        finally:
            self.whole = before

    def applied(self, adapters: "Sequence[ChangesProduct | None]", x_BSD: Tensor, out_BSF: Tensor) -> Tensor:
        """The product with what the adapter of each row adds. adapters: of each task, None where it has none here.

        Those without rows may take part as well, so that each has a gradient in every microbatch.
        """
        if not self.counts:
            return out_BSF
        found = []
        pieces = zip(adapters, x_BSD.split(self.counts), out_BSF.split(self.counts), strict=True)
        for place, (adapter, x, out) in enumerate(pieces):
            if adapter is not None and self.takes_part(place, len(x)):
                out = adapter.applied(x, out)
            found.append(out)
        return torch.cat(found)

    def takes_part(self, place: int, rows: int) -> bool:
        """Whether the adapter of a task computes, of so many rows."""
        return rows > 0 or (torch.is_grad_enabled() and (self.part is None or place in self.part))

    def as_in(self, rows: Sequence[int]) -> list[int]:
        """Rows of each expert as rows of each expert and task, where the rows that are computed are all of one task."""
        return [count * (own > 0) for count in rows for own in self.counts]

    def task_T(self, rows: int, positions: int, device: torch.device) -> Tensor | None:
        """int64: the task of each token of rows that are flattened; None where none goes through an adapter."""
        if not self.counts:
            return None
        assert sum(self.counts) == rows
        parts = [
            torch.full((n * positions,), place, dtype=torch.int64, device=device) for place, n in enumerate(self.counts)
        ]
        return torch.cat(parts)


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
