"""Which rows of a microbatch go through the adapter of which task.

Shapes: B rows, S positions, D inputs, F outputs.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from attrs import define
from torch import Tensor

from xtrain.runtime.models.head_product import HeadFactors


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
