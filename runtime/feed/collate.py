"""Collate chains: stages that turn rows of token segments into a microbatch; each stage is one node of the plan.

A stage declares the kinds of value that it takes and gives, so that a chain is checked before any data flows:

    rows of token arrays ─to_tensor▶ rows of token tensors ─flatten▶ token samples
        ─shift_tokens▶ labelled samples ─pack▶ microbatch ─shard▶ part of a microbatch

A chain that begins with the four stages up to `pack` lays rows out in one pass instead (`loader.py`), with the same
result; the stages run only if another stage is between them. Only under context parallel does a rank take a part of a
microbatch; otherwise the chain ends with `pack`.

Attention is causal, so late positions cost more than early ones. Rank r of a ring of R therefore takes the chunks r and
2R - 1 - r of the 2R equal chunks of every segment, which costs every rank the same (Brandon et al. 2023, arXiv
2311.09431; per segment as in zhuzilin/ring-flash-attention). The part of a ring rank is then cut contiguously over its
ulysses ranks.

With `pad_to`, the rows of a microbatch end at the next multiple of it after their longest document: padding that no
label depends on is cut off after the user's collators, so that these see the same rows in every layout.

An outline is a tensor of constant shape with the positions of segments and padding in the rows of a step, for pipeline
stages that read no tokens: a rank can receive it without knowing the rows.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from attrs import define, evolve, field
from torch import Tensor

from xtrain.dsl.schema.data_components import LOCAL_MICROBATCH, MICROBATCH, RAW_ROWS
from xtrain.plan.arithmetic import LONGEST_PADDING
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.microbatch import IGNORE_INDEX, Microbatch, Sample, Samples, whole_positions
from xtrain.runtime.feed.packing.stored_rows import UNKNOWN, RawRow

# shapes: B rows of the microbatch, S positions of a row, L positions of a sample


@define(kw_only=True, frozen=True, eq=False)
class TensorRow:
    """A packed row in memory of its own: int64 tokens, bool masks, otherwise as `RawRow`."""

    segments: list[Tensor]
    trained: list[Tensor] | None = None
    columns: dict[str, list[Tensor]] = field(factory=dict)
    values: dict[str, list[float]] = field(factory=dict)
    sides: list[int] | None = None
    dataset: int = UNKNOWN
    position: int = UNKNOWN


def numbered_in_rows(value: Samples) -> Iterator[tuple[int, Sample]]:
    """Yield samples, each with its number in its row, from 0."""
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
    """True if the one-pass layout of `loader.py` replaces it."""

    def __call__(self, value: Any) -> Any:
        return self.function(value)

    @property
    def cuts(self) -> bool:
        """True if it takes a rank's part of whole rows."""
        return (self.takes, self.gives) == (MICROBATCH, LOCAL_MICROBATCH)


@define(kw_only=True, frozen=True)
class PackStage(Stage):
    """The stage `pack` with the layout of its rows."""

    capacity: int
    align: int
    of_labels: "PackStage | None" = None
    """The same stage without the parts of a row that only other losses than cross-entropy read; None if there are none.
    """


def longest_padding(align: int) -> int:
    """Return the length of the longest padding segment after the documents of a row, in positions."""
    return max(align, LONGEST_PADDING // align * align)


def known_or_none(numbers: Sequence[int]) -> Tensor | None:
    """Return the dataset or place of each row, int64 [rows]; None if all are UNKNOWN."""
    return None if all(number == UNKNOWN for number in numbers) else torch.tensor(numbers, dtype=torch.int64)


def no_room(row: int, needed: int, capacity: int) -> DataError:
    """Return the error that the samples of a row are longer than the row."""
    return DataError(f"row {row} needs at least {needed} positions, but has {capacity}")


@define(kw_only=True, frozen=True)
class CollateChain:
    """Stages in order, each of which takes what the previous one gives."""

    stages: tuple[Stage, ...]
    pad_to: int | None = None
    """Rows end at the next multiple of this after their longest document; None: they keep their full length."""
    together: bool = False
    """With `pad_to`, all microbatches of a step get the same length, as stages of a pipeline exchange equal tensors."""

    def __call__(self, rows: list[RawRow]) -> Microbatch:
        """Turn rows of token arrays into this rank's part of a microbatch."""
        return self.of_step([rows])[0]

    def of_step(self, rows: Iterable[list[RawRow]]) -> list[Microbatch]:
        """Turn the rows of each microbatch of a step into this rank's parts."""
        return self.behind_pack([self.packed(some) for some in rows])

    def packed(self, rows: list[RawRow]) -> Microbatch:
        """Run the stages up to `pack`."""
        value: Any = rows
        for stage in self.stages:
            if stage.takes not in (MICROBATCH, LOCAL_MICROBATCH):
                value = stage(value)
        return value

    @property
    def lays_out(self) -> PackStage | None:
        """The stage `pack`, if the chain begins with the four stages that end with it, without other stages between
        them."""
        if not all(stage.one_pass for stage in self.stages[:3]):
            return None
        last = self.stages[3] if len(self.stages) > 3 else None
        return last if isinstance(last, PackStage) and last.of_labels is None else None

    @property
    def of_labels(self) -> "CollateChain":
        """The same chain for cross-entropy, which reads only labels of a row."""
        stages = (stage.of_labels or stage if isinstance(stage, PackStage) else stage for stage in self.stages)
        return evolve(self, stages=tuple(stages))

    def behind_pack(self, packed: Sequence[Microbatch]) -> list[Microbatch]:
        """Run the stages after `pack` on the microbatches of a step, or on some of an evaluation."""
        whole = [stage for stage in self.stages if stage.takes == MICROBATCH and not stage.cuts]
        batches = self._trimmed([_through(whole, batch) for batch in packed])
        rank = [stage for stage in self.stages if stage.cuts or stage.takes == LOCAL_MICROBATCH]
        return [_through(rank, batch) for batch in batches]

    def _trimmed(self, batches: list[Microbatch]) -> list[Microbatch]:
        if self.pad_to is None:
            return batches
        lengths = [padded_length(batch, self.pad_to) for batch in batches]
        if self.together:
            lengths = [max(lengths, default=0)] * len(lengths)
        return [trimmed(batch, length) for batch, length in zip(batches, lengths, strict=True)]

    def local_part(self, whole: Microbatch) -> Microbatch:
        """Return this rank's part of whole rows that are not rows of a dataset, or lack their tokens: only `shard`
        runs.

        The user's collators run only on rows that are read: not on a prompt, nor on an outline of rows that another
        pipeline stage has read and collated.
        """
        for stage in self.stages:
            if stage.cuts:
                whole = stage(whole)
        return whole


def _through(stages: Sequence[Stage], batch: Microbatch) -> Microbatch:
    for stage in stages:
        batch = stage(batch)
    return batch


def compose(stages: Sequence[Stage], pad_to: int | None = None, *, together: bool = False) -> CollateChain:
    """Combine `stages` into a chain from rows of token arrays to a microbatch.

    Raises DataError if a stage does not take what the previous one gives, or if the chain starts or ends with another
    kind of value.
    """
    chain = tuple(stages)
    kind, giver = RAW_ROWS, "the loader"
    for stage in chain:
        if stage.takes != kind:
            raise DataError(f"collator `{stage.name}` takes {stage.takes}, but {giver} gives {kind}")
        kind, giver = stage.gives, f"`{stage.name}`"
    if kind not in (MICROBATCH, LOCAL_MICROBATCH):
        raise DataError(f"the collators end with {kind} from {giver}, but a step takes a {MICROBATCH}")
    return CollateChain(stages=chain, pad_to=pad_to, together=together)


# shapes: B rows, S positions of a whole row, L of a shorter one, N segments


def padded_length(batch: Microbatch, multiple: int) -> int:
    """Return the positions that rows of a microbatch need: those up to their last token, rounded up to `multiple`, but
    at most those they have."""
    used_S = batch.real_BS.any(dim=0).nonzero()
    used = int(used_S[-1]) + 1 if len(used_S) else 1
    return min(-(-used // multiple) * multiple, batch.sequence)


def trimmed(batch: Microbatch, length: int) -> Microbatch:
    """Return whole rows without the padding after their first `length` positions."""
    sequence = batch.sequence
    if length == sequence:
        return batch
    starts, ends = batch.cumulative_lengths[:-1].long(), batch.cumulative_lengths[1:].long()
    kept_N = starts % sequence < length
    row_N = starts[kept_N].div(sequence, rounding_mode="floor")
    ends_N = row_N * length + (ends[kept_N] - row_N * sequence).clamp(max=length)

    def cut(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[:, :length].contiguous()

    return evolve(
        batch,
        input_ids_BS=cut(batch.input_ids_BS),
        labels_BS=cut(batch.labels_BS),
        positions_BS=batch.positions_BS[:, :length].contiguous(),
        real_BS=batch.real_BS[:, :length].contiguous(),
        cumulative_lengths=F.pad(ends_N, (1, 0)).to(torch.int32),
        real_lengths=batch.real_lengths[kept_N],
        text_BS=cut(batch.text_BS),
        columns={name: column_BS[:, :length].contiguous() for name, column_BS in batch.columns.items()},
        units=None if batch.units is None else batch.units.trimmed(kept_N, length),
    )


def zigzag(lengths: Tensor, ring: int, rank: int) -> Tensor:
    """Return the positions of `rank` in consecutive segments of the given lengths, in its order, int64 [positions /
    ring].

    Raises DataError if a segment cannot be cut into 2 · ring equal chunks.
    """
    lengths = lengths.to(torch.int64)
    chunks = lengths // (2 * ring)
    if (chunks * (2 * ring) != lengths).any():
        length = int(lengths[chunks * (2 * ring) != lengths][0])
        raise DataError(
            f"a segment of {length} positions cannot be cut into {2 * ring} equal chunks, two for each of {ring} ranks",
            remedy=f"Pad documents to lengths divisible by {2 * ring}.",
        )
    starts = lengths.cumsum(0) - lengths
    early, late = starts + rank * chunks, starts + (2 * ring - 1 - rank) * chunks
    sizes = chunks.repeat_interleave(2)
    shifts = torch.stack((early, late), dim=1).flatten() - (sizes.cumsum(0) - sizes)
    total = int(sizes.sum())
    return shifts.repeat_interleave(sizes, output_size=total).add_(torch.arange(total))


def local_positions(batch: Microbatch, ring: int, ulysses: int, ring_rank: int, ulysses_rank: int) -> Tensor:
    """Return this rank's positions as indices into the flattened whole rows, int64 [B, S / ring / ulysses]."""
    rows, sequence = batch.positions_BS.shape
    if sequence % (ring * ulysses):
        raise DataError(f"rows of {sequence} positions are not divisible by {ring} · {ulysses} ranks")
    ring_part = zigzag(batch.cumulative_lengths.diff(), ring, ring_rank) if ring > 1 else torch.arange(rows * sequence)
    return ring_part.view(rows, ulysses, -1)[:, ulysses_rank]


def local_part(batch: Microbatch, ring: int, ulysses: int, ring_rank: int, ulysses_rank: int) -> Microbatch:
    """Return the microbatch with this rank's positions only; fields of whole rows are kept. Raises as
    `local_positions`."""
    index = local_positions(batch, ring, ulysses, ring_rank, ulysses_rank)
    labels_BS = None if batch.labels_BS is None else batch.labels_BS.take(index)
    return evolve(
        batch,
        input_ids_BS=None if batch.input_ids_BS is None else batch.input_ids_BS.take(index),
        labels_BS=labels_BS,
        positions_BS=batch.positions_BS.take(index),
        real_BS=batch.real_BS.take(index),
        in_row_BS=index % batch.sequence,
        text_BS=None if batch.text_BS is None else batch.text_BS.take(index),
        columns={name: column_BS.flatten(0, 1)[index] for name, column_BS in batch.columns.items()},
        units=None if batch.units is None else batch.units.at(index),
        num_valid=0 if labels_BS is None else int((labels_BS != IGNORE_INDEX).sum()),
    )


# shapes: N microbatches, B rows, S positions of a whole row, T = B·S


# In an outline, a position after the end of a row.
_AFTER: Final = torch.iinfo(torch.int32).min


def encode_outline(microbatches: Sequence[Microbatch], capacity: int, numbers: Sequence[str] = ()) -> Tensor:
    """Encode rows as int32 [N, B, capacity]: a token's position within its segment; its bitwise complement for padding.

    The rows are whole even if the microbatches have only a rank's part of their positions. numbers: `place` or
    `dataset`, each of which adds two int32 after the positions of every row.
    """
    encoded = []
    for batch in microbatches:
        rows, sequence = batch.positions_BS.shape[0], batch.sequence
        positions_T, real_T = whole_positions(batch.cumulative_lengths, batch.real_lengths, rows * sequence)
        outline_BS = torch.where(real_T, positions_T, ~positions_T).to(torch.int32).view(rows, sequence)
        outline_BS = F.pad(outline_BS, (0, capacity - sequence), value=_AFTER)
        known = (getattr(batch, f"{name}_B") for name in numbers)
        beside = [torch.full((rows,), UNKNOWN) if each_B is None else each_B for each_B in known]
        encoded.append(torch.cat([outline_BS, *(each_B.view(torch.int32).view(rows, 2) for each_B in beside)], dim=1))
    return torch.stack(encoded)


def decode_outline(outline_NBS: Tensor, numbers: Sequence[str] = ()) -> list[Microbatch]:
    """Return microbatches of whole rows without tokens, on the CPU. numbers: as they were encoded."""
    return [_decode(outline_BS, numbers) for outline_BS in outline_NBS.cpu()]


def _decode(outline_BS: Tensor, numbers: Sequence[str]) -> Microbatch:
    outline_BS, *beside = outline_BS.split([outline_BS.shape[1] - 2 * len(numbers), *(2 for _ in numbers)], dim=1)
    decoded = {name: part.contiguous().view(torch.int64).view(-1) for name, part in zip(numbers, beside, strict=True)}
    known = {f"{name}_B": each_B for name, each_B in decoded.items() if not (each_B == UNKNOWN).all()}
    outline_BS = outline_BS[:, outline_BS[0] != _AFTER]
    real_BS = outline_BS >= 0
    positions_BS = torch.where(real_BS, outline_BS, ~outline_BS).to(torch.int64)
    starts = (positions_BS.flatten() == 0).nonzero().flatten()
    bounds = F.pad(starts, (0, 1), value=outline_BS.numel())
    real_before = F.pad(real_BS.flatten().cumsum(0), (1, 0))
    whole = Microbatch(
        input_ids_BS=None,
        labels_BS=None,
        positions_BS=positions_BS,
        real_BS=real_BS,
        cumulative_lengths=bounds.to(torch.int32),
        real_lengths=real_before[bounds].diff().to(torch.int32),
        num_valid=0,
    )
    return evolve(whole, **known)
