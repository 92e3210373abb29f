"""The stages that turn rows of token segments into a microbatch; each is one node of the execution plan.

A stage says what kind of value it takes and gives, so that a chain can be checked before any data flows:

    rows of token arrays ─to_tensor▶ rows of token tensors ─flatten▶ token samples
        ─shift_tokens▶ labelled samples ─pack▶ microbatch ─shard▶ part of a microbatch

A chain that begins with the four stages up to `pack` lays rows out in one pass instead (`feeding.py`), which gives the
same; the stages themselves run where something stands between them.
Only under context parallel does a rank take a part of a microbatch; otherwise the chain ends with `pack`.
"""

# shapes: B rows of the microbatch, S positions of a row, L positions of a sample

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from attrs import define, evolve
from torch import Tensor

from ....dsl.user_parts.links import (
    LABELLED_SAMPLES,
    LOCAL_MICROBATCH,
    MICROBATCH,
    RAW_ROWS,
    TENSOR_ROWS,
    TOKEN_SAMPLES,
)
from ....planner.rules.topology import LONGEST_PADDING
from ..errors import DataError
from ..packing.row_reader import UNTOLD, RawRow
from ..packing.rows import check_align
from .batch import IGNORE_INDEX, Microbatch, whole_positions
from .zigzag import local_part


@define(kw_only=True, frozen=True, eq=False)
class TensorRow:
    """A packed row with memory of its own: int64 tokens, bool masks, and otherwise what `RawRow` says."""

    segments: list[Tensor]
    trained: list[Tensor] | None = None
    dataset: int = UNTOLD
    position: int = UNTOLD


@define(kw_only=True, frozen=True, eq=False)
class Sample:
    """One segment on its way into a row."""

    row: int
    """Row of the microbatch it belongs to."""
    tokens: Tensor
    """int64 [L + 1] as read; int64 [L], the inputs, once there are labels."""
    labels: Tensor | None = None
    """int64 [L], or None before they are made; IGNORE_INDEX where no loss is taken."""
    trained: Tensor | None = None
    """bool [L + 1]: whether each token is to be predicted. None: all of them, or the labels say it."""
    dataset: int = UNTOLD
    """Number of its dataset among those that are trained on; UNTOLD if there is one alone, and in evaluation."""
    position: int = UNTOLD
    """Rows of the run before the one it was packed into; UNTOLD in evaluation."""


@define(kw_only=True, frozen=True)
class Samples:
    """The samples of a microbatch, in row order; rows without any exist all the same."""

    num_rows: int
    samples: tuple[Sample, ...]


@define(kw_only=True, frozen=True)
class Stage:
    """A named function with the kinds of value it takes and gives."""

    name: str
    takes: str
    gives: str
    function: Callable[[Any], Any]

    def __call__(self, value: Any) -> Any:
        return self.function(value)


@define(kw_only=True, frozen=True)
class PackStage(Stage):
    """`pack`, and how it lays rows out."""

    capacity: int
    align: int


def to_tensor() -> Stage:
    """Token arrays of any unsigned type become int64 tensors with memory of their own."""
    return Stage(name="to_tensor", takes=RAW_ROWS, gives=TENSOR_ROWS, function=_convert)


def _convert(rows: list[RawRow]) -> list[TensorRow]:
    return [
        TensorRow(
            segments=[torch.from_numpy(segment.astype(np.int64)) for segment in row.segments],
            trained=None if row.trained is None else [torch.from_numpy(mask.astype(np.bool_)) for mask in row.trained],
            dataset=row.dataset,
            position=row.position,
        )
        for row in rows
    ]


def flatten() -> Stage:
    """Nested rows become one list of samples, each knowing its row."""
    return Stage(name="flatten", takes=TENSOR_ROWS, gives=TOKEN_SAMPLES, function=_unnest)


def _unnest(rows: list[TensorRow]) -> Samples:
    samples = (
        Sample(row=index, tokens=tokens, trained=mask, dataset=row.dataset, position=row.position)
        for index, row in enumerate(rows)
        for tokens, mask in zip(row.segments, row.trained or [None] * len(row.segments), strict=True)
    )
    return Samples(num_rows=len(rows), samples=tuple(samples))


def shift_tokens() -> Stage:
    """L + 1 tokens become L inputs, each labelled with the token after it if that is to be predicted.

    Done per sample and before packing: a label is always the next token of the same document, also at the end of a
    chunk, and the last token of a document (eos) is only ever a label.
    The stage raises DataError for a sample of fewer than two tokens, which has no position.
    """
    return Stage(name="shift_tokens", takes=TOKEN_SAMPLES, gives=LABELLED_SAMPLES, function=_shift_all)


def _shift_all(value: Samples) -> Samples:
    return Samples(num_rows=value.num_rows, samples=tuple(map(_shift, value.samples)))


def _shift(sample: Sample) -> Sample:
    if len(sample.tokens) < 2:
        raise DataError(f"a sample of {len(sample.tokens)} tokens in row {sample.row} has nothing to predict")
    labels = sample.tokens[1:]
    if sample.trained is not None:
        labels = torch.where(sample.trained[1:], labels, IGNORE_INDEX)
    return evolve(sample, tokens=sample.tokens[:-1], labels=labels, trained=None)


def pack(*, capacity: int, align: int = 1) -> PackStage:
    """Lay the samples of each row side by side in `capacity` positions; positions restart with every sample.

    A sample is padded to a multiple of `align` positions, which belong to its segment. The rest of a row is padding in
    segments of its own. Padding is input 0, label IGNORE_INDEX; positions go on counting in it.
    Raises DataError if `capacity` is no multiple of `align`; the stage does if a row's samples do not fit, or are of
    several datasets.
    """
    check_align(capacity, align)
    pad_segment = longest_padding(align)

    def lay_out(value: Samples) -> Microbatch:
        shape = (value.num_rows, capacity)
        input_ids_BS = torch.zeros(shape, dtype=torch.int64)
        labels_BS = torch.full(shape, IGNORE_INDEX, dtype=torch.int64)
        filled = [0] * value.num_rows
        datasets, places = [UNTOLD] * value.num_rows, [UNTOLD] * value.num_rows
        segments: list[list[tuple[int, int]]] = [[] for _ in range(value.num_rows)]
        for sample in value.samples:
            assert sample.labels is not None, "compose lets only labelled samples through"
            row, first, real = sample.row, filled[sample.row], len(sample.tokens)
            room = -(-real // align) * align
            if first + room > capacity:
                raise no_room(row, first + room, capacity)
            if datasets[row] not in (UNTOLD, sample.dataset):
                raise DataError(f"row {row} has samples of several datasets: their losses could not be told apart")
            datasets[row], places[row] = sample.dataset, sample.position
            input_ids_BS[row, first : first + real] = sample.tokens
            labels_BS[row, first : first + real] = sample.labels
            filled[row] = first + room
            segments[row].append((room, real))
        for row, used in enumerate(filled):
            whole, rest = divmod(capacity - used, pad_segment)
            segments[row] += [(pad_segment, 0)] * whole + [(rest, 0)] * bool(rest)
        lengths, real_lengths = torch.tensor([pair for row in segments for pair in row], dtype=torch.int32).unbind(1)
        bounds = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        positions_T, real_T = whole_positions(bounds, real_lengths, value.num_rows * capacity)
        return Microbatch(
            input_ids_BS=input_ids_BS,
            labels_BS=labels_BS,
            positions_BS=positions_T.view(shape),
            real_BS=real_T.view(shape),
            cumulative_lengths=bounds,
            real_lengths=real_lengths,
            dataset_B=told(datasets),
            place_B=told(places),
            num_valid=int((labels_BS != IGNORE_INDEX).sum()),
        )

    return PackStage(
        name="pack", takes=LABELLED_SAMPLES, gives=MICROBATCH, function=lay_out, capacity=capacity, align=align
    )


def longest_padding(align: int) -> int:
    """Positions of the longest segment of padding behind the documents of a row."""
    return max(align, LONGEST_PADDING // align * align)


def told(numbers: Sequence[int]) -> Tensor | None:
    """What each row says of itself, its dataset or its place, int64 [rows]; None if all are UNTOLD."""
    return None if all(number == UNTOLD for number in numbers) else torch.tensor(numbers, dtype=torch.int64)


def no_room(row: int, needed: int, capacity: int) -> DataError:
    """What is raised where the samples of a row are longer than the row."""
    return DataError(f"row {row} needs {needed} positions or more, and it has {capacity}")


def shard(*, ring: int, ulysses: int, ring_rank: int, ulysses_rank: int) -> Stage:
    """Keep the positions of one context-parallel rank. The stage raises DataError if they cannot be dealt evenly."""

    def keep(batch: Microbatch) -> Microbatch:
        return local_part(batch, ring, ulysses, ring_rank, ulysses_rank)

    return Stage(name="shard", takes=MICROBATCH, gives=LOCAL_MICROBATCH, function=keep)


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
        if [stage.function for stage in self.stages[:3]] != [_convert, _unnest, _shift_all]:
            return None
        last = self.stages[3] if len(self.stages) > 3 else None
        return last if isinstance(last, PackStage) else None

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
            if (stage.takes, stage.gives) == (MICROBATCH, LOCAL_MICROBATCH):
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
