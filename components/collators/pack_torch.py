"""`pack`: rows of equal length."""

# shapes: B rows of the microbatch, S positions of a row, T = B · S

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xtrain.dsl.schema.data_components import LABELLED_SAMPLES, MICROBATCH, PACKINGS
from xtrain.dsl.schema.losses import LATER, LATER_LABELS, WideColumn
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.base.ops import op
from xtrain.runtime.feed.collate import PackStage, Stage, known_or_none, longest_padding, no_room
from xtrain.runtime.feed.microbatch import IGNORE_INDEX, Microbatch, Sample, Samples, Units, whole_positions
from xtrain.runtime.feed.packing.rows import check_align
from xtrain.runtime.feed.packing.stored_rows import UNKNOWN


def pack(
    *,
    capacity: int,
    align: int = 1,
    unit: str | None = None,
    columns: Sequence[str] = (),
    computed: Sequence[str] = (),
    values: Sequence[str] = (),
    wide: Mapping[str, WideColumn] | None = None,
    later: int = 0,
) -> PackStage:
    """Pack the samples of each row into `capacity` positions; positions restart with every sample.

    A sample is padded to a size divisible by `align`; this padding belongs to its segment. The rest of a row is padding
    in segments of its own. Padding is input 0, label IGNORE_INDEX; its positions continue counting. columns: columns
    that the loss reads; 0 in padding. computed: those of them computed by the run, NaN where they are missing, as in
    evaluation. unit: unit of the loss, `sequence` or `pair`; None: tokens. values: values of each unit that the loss
    reads. wide: columns with several numbers per token. later: number of following tokens in the document whose ids and
    labels are columns too. Raises DataError if `capacity` is not divisible by `align`. The stage raises it if a row's
    samples do not fit, come from several datasets, or lack a column of the loss.
    """
    check_align(capacity, align)
    pad_segment = longest_padding(align)

    def lay_out(value: Samples) -> Microbatch:
        shape = (value.num_rows, capacity)
        input_ids_BS = torch.zeros(shape, dtype=torch.int64)
        labels_BS = torch.full(shape, IGNORE_INDEX, dtype=torch.int64)
        columns_BS = {name: _empty(name, shape, value, computed) for name in columns}
        for name, each in (wide or {}).items():
            columns_BS[name] = torch.zeros((*shape, each.width), dtype=getattr(torch, each.format))
        for depth in range(1, later + 1):
            columns_BS[f"{LATER}/{depth}"] = torch.zeros(shape, dtype=torch.int64)
            columns_BS[f"{LATER_LABELS}/{depth}"] = torch.full(shape, IGNORE_INDEX, dtype=torch.int64)
        filled = [0] * value.num_rows
        datasets, places = [UNKNOWN] * value.num_rows, [UNKNOWN] * value.num_rows
        segments: list[list[tuple[int, int]]] = [[] for _ in range(value.num_rows)]
        owners: list[list[Sample | None]] = [[] for _ in range(value.num_rows)]
        for sample in value.samples:
            assert sample.labels is not None, "compose lets only labelled samples through"
            row, first, real = sample.row, filled[sample.row], len(sample.tokens)
            room = -(-real // align) * align
            if first + room > capacity:
                raise no_room(row, first + room, capacity)
            if datasets[row] not in (UNKNOWN, sample.dataset):
                raise DataError(f"row {row} has samples of several datasets: their losses could not be told apart")
            datasets[row], places[row] = sample.dataset, sample.position
            input_ids_BS[row, first : first + real] = sample.tokens
            labels_BS[row, first : first + real] = sample.labels
            for depth in range(1, min(later + 1, real)):
                place = slice(first, first + real - depth)
                columns_BS[f"{LATER}/{depth}"][row, place] = sample.tokens[depth:]
                columns_BS[f"{LATER_LABELS}/{depth}"][row, place] = sample.labels[depth:]
            for name in (*columns, *(wide or {})):
                column_BS = columns_BS[name]
                if name not in sample.columns and name in computed:
                    continue
                if name not in sample.columns:
                    raise DataError(f"the loss reads the column `{name}`, and a document of row {row} has none")
                column_BS[row, first : first + real] = sample.columns[name]
            filled[row] = first + room
            segments[row].append((room, real))
            owners[row].append(sample)
        for row, used in enumerate(filled):
            whole, rest = divmod(capacity - used, pad_segment)
            segments[row] += [(pad_segment, 0)] * whole + [(rest, 0)] * bool(rest)
            owners[row] += [None] * (len(segments[row]) - len(owners[row]))
        lengths, real_lengths = torch.tensor([pair for row in segments for pair in row], dtype=torch.int32).unbind(1)
        bounds = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        positions_T, real_T = whole_positions(bounds, real_lengths, value.num_rows * capacity)
        units = None
        if unit is not None:
            every = [sample for row in owners for sample in row]
            units = Units.of(unit, bounds, real_lengths, labels_BS, every, values)
        return Microbatch(
            input_ids_BS=input_ids_BS,
            labels_BS=labels_BS,
            positions_BS=positions_T.view(shape),
            real_BS=real_T.view(shape),
            cumulative_lengths=bounds,
            real_lengths=real_lengths,
            dataset_B=known_or_none(datasets),
            place_B=known_or_none(places),
            columns=columns_BS,
            units=units,
            num_valid=int((labels_BS != IGNORE_INDEX).sum()),
        )

    return PackStage(
        name="pack",
        takes=LABELLED_SAMPLES,
        gives=MICROBATCH,
        function=lay_out,
        capacity=capacity,
        align=align,
        of_labels=None
        if unit is None and not columns and not wide and not later
        else pack(capacity=capacity, align=align),
    )


def _empty(name: str, shape: tuple[int, int], samples: Samples, computed: Sequence[str]) -> Tensor:
    """Return an empty column in the format of the samples."""
    known = (sample.columns[name].dtype for sample in samples.samples if name in sample.columns)
    return torch.full(shape, math.nan if name in computed else 0.0, dtype=next(known, torch.float32))


@op("collate.pack", gives="stages")
def append_pack(
    stages: list[Stage],
    method: str,
    capacity: int,
    align: int = 1,
    group: int = 1,
    unit: str | None = None,
    columns: Sequence[str] = (),
    computed: Sequence[str] = (),
    values: Sequence[str] = (),
    wide: dict[str, dict[str, Any]] | None = None,
    later: int = 0,
) -> list[Stage]:
    """Pack samples into rows. `setup.data` has assigned samples to rows by `method` and `group`."""
    assert method in ("auto", *PACKINGS) and group >= 1
    several = {name: WideColumn(**each) for name, each in (wide or {}).items()}
    packed = pack(
        capacity=capacity,
        align=align,
        unit=unit,
        columns=columns,
        computed=computed,
        values=values,
        wide=several,
        later=later,
    )
    return [*stages, packed]
