"""From a step number to the microbatches of one data rank. Nothing here moves: the step is the whole position."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from attrs import define, field

from .batch import Microbatch
from .collators import Chain
from .errors import DataError
from .feeding import RowFeeder
from .order import RowOrder
from .row_reader import PADDING
from .rows import Rows
from .store import TokenStore

# What may not change between the run that wrote a state and the one that resumes it, in words.
RESUME_FIELDS = {
    "num_rows": "number of packed rows",
    "capacity": "positions in a row",
    "align": "multiple of positions that documents are padded to",
    "rows_per_step": "rows in an optimizer step (micro · accumulate · data ranks)",
    "seed": "seed of the row order",
    "content": "content of the rows (data, tokenizer, hold-out or packing)",
}


@define(kw_only=True, frozen=True, eq=False)
class RowLoader:
    """Training microbatches of one data rank.

    With G = micro · accumulate · data_ranks, optimizer step s (from 0) takes the global positions s·G … s·G + G - 1 of
    `order`. How they are dealt to ranks and microbatches does not change which rows a step sees: in that order, or so
    that attention costs all ranks about the same (`dealing.py`).
    """

    store: TokenStore
    documents: np.ndarray
    """int64: the document of the store that each document index in `rows` stands for."""
    rows: Rows
    order: RowOrder
    collate: Chain
    micro: int
    """Rows in a microbatch."""
    accumulate: int
    """Microbatches in an optimizer step."""
    data_rank: int
    data_ranks: int
    balance: bool = False
    """Deal the rows of a step by what attention costs in them."""
    _feeder: RowFeeder = field(init=False)

    @_feeder.default  # pyright: ignore[reportAttributeAccessIssue]
    def _make_feeder(self) -> RowFeeder:
        assert self.order.num_rows == self.rows.num_rows, "the order is made for these rows"
        assert min(self.micro, self.accumulate) >= 1
        assert 0 <= self.data_rank < self.data_ranks
        return RowFeeder(store=self.store, documents=self.documents, rows=self.rows, collate=self.collate)

    @property
    def rows_per_step(self) -> int:
        """G, over all ranks."""
        return self.micro * self.accumulate * self.data_ranks

    def row_indices(self, step: int) -> np.ndarray:
        """Rows that this rank takes in `step`, int64 [accumulate, micro]."""
        step_rows = self.order.rows(step * self.rows_per_step, self.rows_per_step)
        if self.balance:
            from .dealing import deal, row_costs

            costs = row_costs(self.store, self.documents, self.rows, step_rows)
            return step_rows[deal(costs, self.accumulate, self.data_ranks, self.micro)[:, self.data_rank]]
        return step_rows.reshape(self.accumulate, self.data_ranks, self.micro)[:, self.data_rank]

    def make_ready(self) -> None:
        """Read compiled code and shuffle now, so that no step waits for it; tokens are not read."""
        self.row_indices(0)
        self._feeder.microbatch(np.full(self.micro, PADDING, dtype=np.int64))

    def microbatches(self, step: int) -> list[Microbatch]:
        """The `accumulate` microbatches of optimizer step `step`, from 0."""
        return [self._feeder.microbatch(indices) for indices in self.row_indices(step)]

    def epoch(self, step: int) -> float:
        """Epochs completed before `step`."""
        return step * self.rows_per_step / self.rows.num_rows

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint keeps so that `step` (the next one to take) can be resumed exactly; JSON values."""
        return {
            "step": step,
            "num_rows": self.rows.num_rows,
            "capacity": self.rows.capacity,
            "align": self.rows.align,
            "rows_per_step": self.rows_per_step,
            "seed": self.order.seed,
            "content": self._feeder.fingerprint,
        }

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise DataError naming every difference that would make the steps from `state["step"]` on see other rows."""
        mine = self.state(0)
        differences = "".join(
            f"\n    {words}: {state.get(name, 'missing')} in the checkpoint, {mine[name]} now"
            for name, words in RESUME_FIELDS.items()
            if state.get(name) != mine[name]
        )
        if differences:
            raise DataError(
                f"the data is not what the checkpoint was trained on:{differences}",
                remedy="Restore these settings, or start a new run from the checkpoint's weights alone.",
            )


@define(kw_only=True, frozen=True, eq=False)
class EvalLoader:
    """Held-out rows in order, each once, dealt to data ranks in global batches of micro · data_ranks rows.

    Every rank yields the same number of microbatches, as its peers wait for it in collectives; where the rows run out
    it gets rows of padding, which have no valid label.
    """

    store: TokenStore
    documents: np.ndarray
    """int64: the document of the store that each document index in `rows` stands for."""
    rows: Rows
    collate: Chain
    micro: int
    """Rows in a microbatch."""
    data_rank: int
    data_ranks: int
    max_rows: int | None = None
    """Rows to stop after, over all ranks; None for all rows."""

    def __attrs_post_init__(self) -> None:
        assert self.micro >= 1
        assert 0 <= self.data_rank < self.data_ranks

    def __len__(self) -> int:
        """Microbatches of every rank."""
        return -(-self.num_rows // (self.micro * self.data_ranks))

    @property
    def num_rows(self) -> int:
        """Rows that are evaluated, over all ranks."""
        return self.rows.num_rows if self.max_rows is None else min(self.rows.num_rows, self.max_rows)

    def __iter__(self) -> Iterator[Microbatch]:
        feeder = RowFeeder(store=self.store, documents=self.documents, rows=self.rows, collate=self.collate)
        for batch in range(len(self)):
            first = (batch * self.data_ranks + self.data_rank) * self.micro
            indices = np.arange(first, first + self.micro, dtype=np.int64)
            yield feeder.microbatch(np.where(indices < self.num_rows, indices, PADDING))
