"""`collate.user`: a user-defined collator as a stage of the chain.

The collator is called once per row and sees only that row, so its result does not depend on how rows are assigned to
ranks and microbatches. Rows of padding are not passed to it. Its result is validated, because a mistake would otherwise
show, if at all, as a slightly wrong loss. It cannot change the place of a row in the run, its dataset, or the number
of labels that count.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from hashlib import blake2b
from itertools import pairwise
from threading import Lock
from typing import Any, Final

import numpy as np
import torch
from attrs import define, evolve, fields
from torch import Tensor

from xtrain.dsl.schema.data_components import LABELLED_SAMPLES, LOCAL_MICROBATCH, TENSOR_ROWS, TOKEN_SAMPLES
from xtrain.dsl.schema.losses import TEACHER_IDS, TEACHER_LOGPROBS
from xtrain.dsl.user_parts.kinds import GENERATOR
from xtrain.plan.plan import Plan
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.user_parts import UserPart, failures_of, part_of, spec_folder
from xtrain.runtime.feed.collate import Stage, TensorRow
from xtrain.runtime.feed.microbatch import IGNORE_INDEX, Microbatch, Sample, Samples, Units, whole_positions
from xtrain.runtime.feed.packing.stored_rows import UNKNOWN, RawRow

# shapes: B rows of the microbatch


OF_ROWS: Final = tuple(each.name for each in fields(Microbatch) if each.name.endswith(("_B", "_BS")))
"""Tensors of a microbatch whose first dim is its rows."""


def split_rows(batch: Microbatch) -> list[Microbatch]:
    """Return each row as a microbatch; tensors are views. Segments do not cross rows, so none is cut."""
    rows, sequence = batch.positions_BS.shape[0], batch.sequence
    starts = torch.arange(rows + 1, dtype=batch.cumulative_lengths.dtype) * sequence
    cuts = torch.searchsorted(batch.cumulative_lengths, starts).tolist()

    def row_microbatch(row: int, first: int, end: int) -> Microbatch:
        own = slice(row, row + 1)
        return evolve(
            batch,
            **{name: _part(getattr(batch, name), own) for name in OF_ROWS},
            cumulative_lengths=batch.cumulative_lengths[first : end + 1] - row * sequence,
            real_lengths=batch.real_lengths[first:end],
            columns={name: column_BS[own] for name, column_BS in batch.columns.items()},
            units=None if batch.units is None else batch.units.part(row, first, end),
            num_valid=count_valid(_part(batch.labels_BS, own)),
        )

    return [row_microbatch(row, first, end) for row, (first, end) in enumerate(pairwise(cuts))]


def join_rows(rows: Sequence[Microbatch]) -> Microbatch:
    """Join rows into one microbatch in memory of its own."""
    sequence = rows[0].sequence
    bounds = [row.cumulative_lengths[:-1] + number * sequence for number, row in enumerate(rows)]
    end = torch.tensor([len(rows) * sequence], dtype=rows[0].cumulative_lengths.dtype)
    return evolve(
        rows[0],
        **{name: _all([getattr(row, name) for row in rows]) for name in OF_ROWS},
        cumulative_lengths=torch.cat([*bounds, end]),
        real_lengths=torch.cat([row.real_lengths for row in rows]),
        columns={name: torch.cat([row.columns[name] for row in rows]) for name in rows[0].columns},
        units=Units.joined(units) if (units := [row.units for row in rows if row.units is not None]) else None,
        num_valid=sum(row.num_valid for row in rows),
    )


def count_valid(labels_BS: Tensor | None) -> int:
    """Return the number of labels with a loss."""
    return 0 if labels_BS is None else int((labels_BS != IGNORE_INDEX).sum())


def _part(tensor: Tensor | None, rows: slice) -> Tensor | None:
    return None if tensor is None else tensor[rows]


def _all(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """Concatenate the tensors; None if there are none."""
    present = [tensor for tensor in tensors if tensor is not None]
    assert len(present) in (0, len(tensors)), "rows of one microbatch have the same tensors"
    return torch.cat(present) if present else None


# shapes: L positions of a sample, B rows, S positions of a row that this rank holds


class Wrong(Exception):
    """The fault of a value, as the end of a sentence that begins with its giver."""


def check_samples(
    given: Sequence[Any], row: int, dataset: int, position: int, vocab: int, *, labelled: bool
) -> list[Sample]:
    """Return the checked samples of row `row` of the microbatch. Raises Wrong."""
    for number, sample in enumerate(given):
        if not isinstance(sample, Sample):
            raise Wrong(f"gave {kind_of(sample)} as sample {number} instead of a Sample")
        gave = f"gave sample {number} with"
        _check_ids(sample.tokens, f"{gave} tokens")
        least = 1 if labelled else 2  # of two tokens the second is predicted
        if len(sample.tokens) < least:
            raise Wrong(f"{gave} {_count(len(sample.tokens), 'token')}, and it needs {least} or more")
        if labelled:
            if sample.labels is None:
                raise Wrong(f"{gave}out labels")
            _check_ids(sample.labels, f"{gave} labels", len(sample.tokens))
            if sample.trained is not None:
                raise Wrong(f"{gave} labels and a mask `trained`: it is None where labels say what is predicted")
        elif sample.labels is not None:
            raise Wrong(f"{gave} labels already: declare it with `gives`")
        elif sample.trained is not None:
            _check_tensor(sample.trained, torch.bool, f"{gave} `trained`", len(sample.tokens))
        for name, column in sample.columns.items():
            several = name in (TEACHER_IDS, TEACHER_LOGPROBS) and isinstance(column, Tensor)
            kind = torch.int32 if name == TEACHER_IDS else torch.float32
            width = column.shape[1:] if several else ()
            _check_tensor(column, kind, f"{gave} column `{name}`", len(sample.tokens), *width)
        before = given[number - 1].side if number else 1
        if sample.side not in (0, 1) or (sample.side == 1 and before == 1):
            raise Wrong(f"{gave} side {sample.side}, and the second side of a pair, 1, follows its first, 0")
    if given:
        _check_range([sample.tokens for sample in given], vocab, "sample", "tokens")
        if labelled:
            _check_range([sample.labels for sample in given], vocab, "sample", "labels", ignored=True)
    return [evolve(sample, row=row, dataset=dataset, position=position) for sample in given]


def check_row(given: Any, kind: type[RawRow] | type[TensorRow], before: RawRow | TensorRow, vocab: int) -> Any:
    """Check a row before it is cut into samples. Raises Wrong."""
    if not isinstance(given, kind):
        raise Wrong(f"gave {kind_of(given)} instead of a {kind.__name__}")
    for number, segment in enumerate(given.segments):
        gave = f"gave segment {number}"
        if isinstance(given, TensorRow):
            _check_ids(segment, gave)
        elif not (isinstance(segment, np.ndarray) and segment.ndim == 1 and segment.dtype.kind in "ui"):
            raise Wrong(f"{gave} as {_array_kind(segment)} instead of a numpy array of whole numbers [L + 1]")
        if len(segment) < 2:
            raise Wrong(f"{gave} with {_count(len(segment), 'token')}, and it needs 2 or more")
    masks = given.trained
    if masks is not None and [len(mask) for mask in masks] != [len(segment) for segment in given.segments]:
        raise Wrong("gave `trained` that does not fit the segments, mask by mask")
    for name, parts in given.columns.items():
        if [len(part) for part in parts] != [len(segment) for segment in given.segments]:
            raise Wrong(f"gave column `{name}` that does not fit the segments, number by number")
    if given.segments:
        _check_range([torch.as_tensor(np.asarray(ids, dtype=np.int64)) for ids in given.segments], vocab, "segment")
    return evolve(given, dataset=before.dataset, position=before.position)


def check_microbatch(given: Any, before: Microbatch, vocab: int, *, local: bool) -> Microbatch:
    """Check a microbatch of one row, or a rank's part of one (`local`), whose layout must stay. Raises Wrong."""
    if not isinstance(given, Microbatch):
        raise Wrong(f"gave {kind_of(given)} instead of a Microbatch")
    shape = tuple(before.positions_BS.shape)
    tensors = (("input_ids_BS", torch.int64), ("labels_BS", torch.int64), ("positions_BS", torch.int64),
               ("real_BS", torch.bool))  # fmt: skip
    for name, dtype in tensors:
        _check_tensor(getattr(given, name), dtype, f"gave `{name}`", *shape)
    assert given.input_ids_BS is not None and given.labels_BS is not None
    _check_layout(given, before, local=local)
    _check_range([given.input_ids_BS.flatten()], vocab, "", "`input_ids_BS`")
    _check_range([given.labels_BS.flatten()], vocab, "", "`labels_BS`", ignored=True)
    if bool((given.labels_BS[~given.real_BS] != IGNORE_INDEX).any()):
        raise Wrong("gave labels for padding")
    if before.units is not None:
        assert before.labels_BS is not None
        same = torch.equal(given.labels_BS != IGNORE_INDEX, before.labels_BS != IGNORE_INDEX)
        if not same or not torch.equal(given.cumulative_lengths, before.cumulative_lengths):
            raise Wrong("moved labels or segments, and the loss counts sequences: change them before `pack`")
    return evolve(
        given,
        dataset_B=before.dataset_B,
        place_B=before.place_B,
        columns=before.columns,
        units=before.units,
        num_valid=count_valid(given.labels_BS),
    )


def _check_layout(given: Microbatch, before: Microbatch, *, local: bool) -> None:
    """Check the bounds of segments, which different parts of a model read from different fields."""
    names = ("cumulative_lengths", "real_lengths", "positions_BS", "real_BS")
    if all(torch.equal(getattr(given, name), getattr(before, name)) for name in names):
        return
    if local:
        raise Wrong("moved segments or padding: after `shard` other ranks have the rest of them")
    bounds, real = given.cumulative_lengths, given.real_lengths
    for name, tensor, size in (("cumulative_lengths", bounds, len(real) + 1), ("real_lengths", real, len(bounds) - 1)):
        _check_tensor(tensor, torch.int32, f"gave `{name}`", size)
    lengths, total = bounds.diff(), before.sequence
    if int(bounds[0]) != 0 or int(bounds[-1]) != total or bool((lengths < 1).any()):
        raise Wrong(f"gave `cumulative_lengths` that do not rise from 0 to the {total} positions of the row")
    if bool((real < 0).any()) or bool((real > lengths).any()):
        raise Wrong("gave `real_lengths` that are longer than their segments")
    positions_T, real_T = whole_positions(bounds, real, total)
    if not (torch.equal(given.positions_BS.flatten(), positions_T) and torch.equal(given.real_BS.flatten(), real_T)):
        raise Wrong("gave `positions_BS` or `real_BS` that do not follow from the lengths of the segments")


def _check_ids(value: Any, gave: str, length: int | None = None) -> None:
    """Check token ids or labels of a sample: int64 [length]."""
    _check_tensor(value, torch.int64, gave, *(() if length is None else (length,)))
    if value.ndim != 1:
        raise Wrong(f"{gave} of shape {list(value.shape)} instead of one dimension")


def _check_tensor(value: Any, dtype: torch.dtype, gave: str, *shape: int) -> None:
    if not isinstance(value, Tensor):
        raise Wrong(f"{gave} as {_array_kind(value)} instead of a tensor")
    if value.dtype != dtype:
        raise Wrong(f"{gave} of {value.dtype} instead of {dtype}".replace("torch.", ""))
    if shape and tuple(value.shape) != shape:
        raise Wrong(f"{gave} of shape {list(value.shape)} instead of {list(shape)}")
    if value.device.type != "cpu":
        raise Wrong(f"{gave} on {value.device}; microbatches are made on the CPU")


def _check_range(
    ids: Sequence[Tensor | None], vocab: int, each: str, what: str = "tokens", *, ignored: bool = False
) -> None:
    """Check that ids are below the size of the vocabulary; labels may also be IGNORE_INDEX. One check of all, as it
    runs each step."""
    present = [tensor for tensor in ids if tensor is not None]
    whole = torch.cat(present)
    if ignored:
        whole = whole.where(whole != IGNORE_INDEX, 0)
    if not len(whole):
        return
    low, high = (int(bound) for bound in whole.aminmax())
    if low >= 0 and high < vocab:
        return
    wrong = low if low < 0 else high
    number = next(number for number, tensor in enumerate(present) if bool((tensor == wrong).any()))
    whose = f"{each} {number} with " if each else ""
    allowed = f"0 to {vocab - 1:,}" + (f" or {IGNORE_INDEX}" if ignored else "")
    raise Wrong(f"gave {whose}{wrong:,} among its {what}; they are {allowed}")


def kind_of(value: Any) -> str:
    """Return the type of a value for messages."""
    return "None" if value is None else f"a value of type {type(value).__name__}"


def _array_kind(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"a numpy array of {value.dtype} {list(value.shape)}"
    return kind_of(value)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


# First words of the random seed, so that training and evaluation are independent.
_TRAINING, _EVALUATION = 1, 2
# A thread may read ahead while another evaluates; user code need not be thread-safe.
_TURN = Lock()


@op("collate.user", gives="stages")
def user_collator(
    plan: Plan,
    node_id: str,
    stages: list[Stage],
    module: str,
    function: str,
    digest: str,
    arguments: dict[str, Any],
    takes: str,
    gives: str,
    variables: dict[str, str] | None = None,
) -> list[Stage]:
    """Append the stage. Raises PartChanged if the code differs from the planned code, PartFailed if it cannot be
    loaded."""
    options = {"module": module, "function": function, "digest": digest, "arguments": arguments}
    options["variables"] = variables or {}
    part = part_of("collator", options, spec_folder(plan.spec))
    calls = CollatorCalls(
        part=part,
        node=node_id,
        takes=takes,
        gives=gives,
        vocab=plan.architecture.vocab,
        seed=plan.seed,
        random=GENERATOR in inspect.signature(part.load()).parameters,
    )
    return [*stages, Stage(name=function, takes=takes, gives=gives, function=calls)]


@define(kw_only=True, frozen=True, eq=False)
class CollatorCalls:
    """Calls a collator row by row. It can be pickled: the user's code is loaded in the process that runs it."""

    part: UserPart
    node: str
    """Its node in the plan: two nodes of one name draw different numbers."""
    takes: str
    gives: str
    vocab: int
    """Vocabulary size, an exclusive bound of token ids."""
    seed: int
    random: bool
    """True if the collator asks for random numbers."""

    def __call__(self, value: Any) -> Any:
        """Apply the collator to all rows. Raises PartFailed if it raises or returns something invalid."""
        if isinstance(value, Samples):
            return self._of_samples(value)
        if isinstance(value, Microbatch):
            return join_rows([self._microbatch(row) for row in split_rows(value)])
        if self.gives in (TOKEN_SAMPLES, LABELLED_SAMPLES):
            cut = [
                self._samples(row, n, row.dataset, row.position) if row.segments else [] for n, row in enumerate(value)
            ]
            return _gathered(cut)
        return [self._row(row) for row in value]

    # Kinds of value ---------------------------------------------------------------------------------------------------

    def _of_samples(self, value: Samples) -> Samples:
        rows: list[list[Sample]] = [[] for _ in range(value.num_rows)]
        for sample in value.samples:
            # Labels are a view of the tokens: without a copy, writing to one would change the other.
            labels = None if sample.labels is None else sample.labels.clone()
            rows[sample.row].append(evolve(sample, labels=labels))
        samples = [
            self._samples(row, number, row[0].dataset, row[0].position) if row else []
            for number, row in enumerate(rows)
        ]
        return _gathered(samples)

    def _samples(self, shown: Any, row: int, dataset: int, position: int) -> list[Sample]:
        """Return the collator's samples for row `row` of the microbatch."""
        given = self._call(shown, position)
        with self._naming_row(position):
            if isinstance(given, str | bytes | Samples) or not hasattr(given, "__iter__"):
                raise Wrong(f"gave {kind_of(given)} instead of a list of samples")
        with _TURN, failures_of(self.part):
            samples = list(given)  # it may be a generator
        with self._naming_row(position):
            labelled = self.gives == LABELLED_SAMPLES
            return check_samples(samples, row, dataset, position, self.vocab, labelled=labelled)

    def _row(self, row: RawRow | TensorRow) -> Any:
        kind = TensorRow if self.gives == TENSOR_ROWS else RawRow
        if not row.segments:
            return kind(segments=[], dataset=row.dataset, position=row.position)
        given = self._call(row, row.position)
        with self._naming_row(row.position):
            return check_row(given, kind, row, self.vocab)

    def _microbatch(self, row: Microbatch) -> Microbatch:
        if not bool(row.real_BS.any()):
            return row
        position = UNKNOWN if row.place_B is None else int(row.place_B[0])
        given = self._call(row, position)
        with self._naming_row(position):
            return check_microbatch(given, row, self.vocab, local=self.gives == LOCAL_MICROBATCH)

    # Calls ------------------------------------------------------------------------------------------------------------

    def _call(self, shown: Any, position: int) -> Any:
        function = self.part.load()
        # Copies: a call that changes its list must not affect the next row.
        arguments = deepcopy(self.part.arguments)
        if self.random:
            arguments[GENERATOR] = self._generator(shown, position)
        with _TURN, failures_of(self.part):
            return function(shown, **arguments)

    def _generator(self, shown: Any, position: int) -> np.random.Generator:
        """Return the random generator of a row, seeded by its position in the run, which no layout changes; in
        evaluation, by its tokens."""
        whose = blake2b(self.node.encode(), digest_size=8)
        if position == UNKNOWN:
            for tokens in _token_arrays(shown):
                whose.update(np.ascontiguousarray(tokens, dtype=np.int64).data)
        kind, place = (_EVALUATION, 0) if position == UNKNOWN else (_TRAINING, position)
        return np.random.default_rng([kind, self.seed, place, int.from_bytes(whose.digest(), "little")])

    @contextmanager
    def _naming_row(self, position: int) -> Iterator[None]:
        """Turn Wrong into PartFailed, with the location of the function and the row."""
        try:
            yield
        except Wrong as wrong:
            whose = "a row of evaluation" if position == UNKNOWN else f"row {position:,} of the run"
            raise self.part.failed(f"{wrong} ({whose})") from None


def _gathered(rows: list[list[Sample]]) -> Samples:
    return Samples(num_rows=len(rows), samples=tuple(sample for row in rows for sample in row))


def _token_arrays(shown: Any) -> list[Any]:
    """Return the tokens of a row of any kind of value."""
    match shown:
        case Microbatch():
            return [shown.input_ids_BS]
        case RawRow() | TensorRow():
            return list(shown.segments)
    return [sample.tokens for sample in shown]
