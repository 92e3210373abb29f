"""Chains of stages that turn rows of token segments into a microbatch; each stage is one node of the execution plan.

A stage says what kind of value it takes and gives, so that a chain can be checked before any data flows:

    rows of token arrays ─to_tensor▶ rows of token tensors ─flatten▶ token samples
        ─shift_tokens▶ labelled samples ─pack▶ microbatch ─shard▶ part of a microbatch

A chain that begins with the four stages up to `pack` lays rows out in one pass instead (`feeding.py`), which gives the
same; the stages themselves run where something stands between them.
Only under context parallel does a rank take a part of a microbatch; otherwise the chain ends with `pack`.
"""

# shapes: B rows of the microbatch, S positions of a row, L positions of a sample

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from xtrain.dsl.schema.collators import (
    LOCAL_MICROBATCH,
    MICROBATCH,
    RAW_ROWS,
)
from xtrain.planner.rules.topology import LONGEST_PADDING
from xtrain.runtime.data.collate.batch import Microbatch
from xtrain.runtime.data.collate.samples import Sample, Samples
from xtrain.runtime.data.errors import DataError
from xtrain.runtime.data.packing.row_reader import UNKNOWN, RawRow


@define(kw_only=True, frozen=True, eq=False)
class TensorRow:
    """A packed row with memory of its own: int64 tokens, bool masks, and otherwise what `RawRow` says."""

    segments: list[Tensor]
    trained: list[Tensor] | None = None
    columns: dict[str, list[Tensor]] = field(factory=dict)
    values: dict[str, list[float]] = field(factory=dict)
    sides: list[int] | None = None
    dataset: int = UNKNOWN
    position: int = UNKNOWN


def numbered_in_rows(value: Samples) -> Iterator[tuple[int, Sample]]:
    """Samples, each with its number in its row, from 0."""
    row, number = -1, 0
    for sample in value.samples:
        row, number = (sample.row, 0) if sample.row != row else (row, number + 1)
        yield number, sample


@define(kw_only=True, frozen=True)
class Stage:
    """A named function with the kinds of value it takes and gives."""

    name: str
    takes: str
    gives: str
    function: Callable[[Any], Any]
    one_pass: bool = False
    """Whether it is part of what `feeding.py` does in one pass."""

    def __call__(self, value: Any) -> Any:
        return self.function(value)

    @property
    def cuts(self) -> bool:
        """Whether it takes a rank's part of whole rows."""
        return (self.takes, self.gives) == (MICROBATCH, LOCAL_MICROBATCH)


@define(kw_only=True, frozen=True)
class PackStage(Stage):
    """`pack`, and how it lays rows out."""

    capacity: int
    align: int
    of_labels: "PackStage | None" = None
    """Where the loss reads more of a row than its labels: the same without the rest."""

    @property
    def labels_alone(self) -> bool:
        """Whether the loss reads nothing of a row but its labels."""
        return self.of_labels is None


def longest_padding(align: int) -> int:
    """Positions of the longest segment of padding behind the documents of a row."""
    return max(align, LONGEST_PADDING // align * align)


def known_or_none(numbers: Sequence[int]) -> Tensor | None:
    """Of each row its dataset or its place, int64 [rows]; None if all are UNKNOWN."""
    return None if all(number == UNKNOWN for number in numbers) else torch.tensor(numbers, dtype=torch.int64)


def no_room(row: int, needed: int, capacity: int) -> DataError:
    """What is raised where the samples of a row are longer than the row."""
    return DataError(f"row {row} needs {needed} positions or more, and it has {capacity}")


@define(kw_only=True, frozen=True)
class CollateChain:
    """Stages in order, each of which takes what the one before it gives."""

    stages: tuple[Stage, ...]

    def __call__(self, rows: list[RawRow]) -> Microbatch:
        """From rows of token arrays to what this rank holds of them."""
        value: Any = rows
        for stage in self.stages:
            value = stage(value)
        return value

    @property
    def lays_out(self) -> PackStage | None:
        """`pack`, if the chain begins with the four stages that end with it, and nothing else stands between them."""
        if not all(stage.one_pass for stage in self.stages[:3]):
            return None
        last = self.stages[3] if len(self.stages) > 3 else None
        return last if isinstance(last, PackStage) and last.labels_alone else None

    @property
    def of_labels(self) -> "CollateChain":
        """The same for the cross-entropy, which reads nothing of a row but its labels."""
        stages = (stage.of_labels or stage if isinstance(stage, PackStage) else stage for stage in self.stages)
        return CollateChain(stages=tuple(stages))

    def behind_pack(self, packed: Microbatch) -> Microbatch:
        """What the stages behind `pack` make of rows that were laid out elsewhere."""
        for stage in self.stages:
            if stage.takes in (MICROBATCH, LOCAL_MICROBATCH):
                packed = stage(packed)
        return packed

    def local_part(self, whole: Microbatch) -> Microbatch:
        """What this rank holds of whole rows that are no rows of a dataset, or lack their tokens: `shard` alone.

        Collators of the user's own are for rows that are read: of a prompt, or of where documents lie in rows that
        another pipeline stage has read and collated, they are shown nothing.
        """
        for stage in self.stages:
            if stage.cuts:
                whole = stage(whole)
        return whole


def compose(stages: Sequence[Stage]) -> CollateChain:
    """One function that runs `stages` in order, from rows of token arrays to a microbatch.

    Raises DataError if a stage does not take what the one before it gives, or if the chain starts or ends elsewhere.
    """
    chain = tuple(stages)
    kind, giver = RAW_ROWS, "the loader"
    for stage in chain:
        if stage.takes != kind:
            raise DataError(f"collator `{stage.name}` takes {stage.takes}, but {giver} gives {kind}")
        kind, giver = stage.gives, f"`{stage.name}`"
    if kind not in (MICROBATCH, LOCAL_MICROBATCH):
        raise DataError(f"the collators end with {kind} from {giver}, but a step takes a {MICROBATCH}")
    return CollateChain(stages=chain)
