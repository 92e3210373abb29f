"""Reads packed rows out of a token store."""

from functools import cached_property
from hashlib import blake2b
from typing import Final

import numpy as np
from attrs import define, evolve, field, frozen

from xtrain.runtime.data.packing.pairs import cut_sides, sides_of
from xtrain.runtime.data.packing.rows import Rows
from xtrain.runtime.data.stores.store import TokenStore

# The number of a row that holds nothing but padding.
PADDING: Final = -1
# Where nobody asks which dataset a row is of, or where it stands in the run.
UNKNOWN: Final = -1


@frozen(kw_only=True, eq=False)
class RawRow:
    """A packed row as it lies in a store."""

    segments: list[np.ndarray]
    """Views into the store; L positions come with L + 1 tokens, the last a label."""
    trained: list[np.ndarray] | None = None
    """Of each segment, uint8 [L + 1]: 1 where the token is to be predicted. None: all of them are."""
    columns: dict[str, list[np.ndarray]] = field(factory=dict)
    """Numbers along the tokens of each segment, float32 or float64 [L + 1], or several of each [L + 1, width], by
    name."""
    values: dict[str, list[float]] = field(factory=dict)
    """Numbers of the document of each segment, by name."""
    sides: list[int] | None = None
    """Of each segment, 0 for the preferred side of a pair, 1 for the other side behind it. None: there are no pairs."""
    dataset: int = UNKNOWN
    """Number of its dataset among those that are trained on; UNKNOWN if there is one alone, and in evaluation."""
    position: int = UNKNOWN
    """Rows of the run before it; UNKNOWN in evaluation."""


@define(kw_only=True, frozen=True, eq=False)
class RowReader:
    """Reads the tokens of packed rows."""

    store: TokenStore
    documents: np.ndarray
    """int64: the document of the store that each document index in `rows` stands for."""
    rows: Rows

    def row(self, index: int, *, dataset: int = UNKNOWN, position: int = UNKNOWN) -> RawRow:
        """Row `index`, without segments for PADDING; it says of itself what `dataset` and `position` say."""
        if index == PADDING:
            return RawRow(segments=[], dataset=dataset, position=position)
        store = self.store
        documents, cuts = self._cuts(index)
        sides = None if store.firsts is None else [0, 1] * (len(documents) // 2)
        return RawRow(
            segments=[store.tokens[cut] for cut in cuts],
            trained=None if store.trained is None else [store.trained[cut] for cut in cuts],
            columns={name: [column[cut] for cut in cuts] for name, column in store.columns.items()},
            values={name: value[documents].tolist() for name, value in store.values.items()},
            sides=sides,
            dataset=dataset,
            position=position,
        )

    def labels_at(self, index: int, *, exchanged: bool = False) -> np.ndarray:
        """int64 [capacity]: which token of the store the label of each position of a row is; -1 where there is none.
        exchanged: in the row that `mismatched` makes of it."""
        rows, trained, cuts = self.rows, self.store.trained, self._cuts(index)[1]
        row = RawRow(
            segments=[np.arange(cut.start, cut.stop) for cut in cuts],
            trained=None if trained is None else [trained[cut] for cut in cuts],
        )
        row = mismatched(row, rows) if exchanged else row
        places = np.full(rows.capacity, -1, dtype=np.int64)
        filled = 0
        for segment in row.segments:
            length = len(segment) - 1
            places[filled : filled + length] = segment[1:]
            filled += -(-length // rows.align) * rows.align
        if trained is not None:
            places[places >= 0] = np.where(trained[places[places >= 0]] > 0, places[places >= 0], -1)
        return places

    def _cuts(self, index: int) -> tuple[np.ndarray, list[slice]]:
        """The document of each segment of a row, int64, and its tokens in the store."""
        rows, store = self.rows, self.store
        segments = slice(int(rows.row_offsets[index]), int(rows.row_offsets[index + 1]))
        documents = self.documents[rows.document[segments]]
        if store.firsts is None:
            first = store.offsets[documents] + rows.starts(segments)
            # The last position of a document reads its last token but one.
            end = np.minimum(first + rows.capacity + 1, store.offsets[documents + 1])
        else:
            first, end = self._pairs(documents)
            documents = np.repeat(documents, 2)
        return documents, [slice(a, b) for a, b in zip(first.tolist(), end.tolist(), strict=True)]

    def _pairs(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The first token of each side of some pairs, and one behind its last, int64 [2 · documents] both."""
        rows, firsts = self.rows, self.store.firsts
        assert firsts is not None
        begin = self.store.offsets[documents]
        first = np.stack([begin, begin + firsts[documents]], axis=1).ravel()
        positions = cut_sides(*sides_of(self.store, documents), rows.capacity, rows.align)
        return first, first + np.stack(positions, axis=1).ravel() + 1

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of every row's content: the store's, the choice of documents, and their packing."""
        return self._digest(self.store.key)

    def was_called(self, fingerprint: str) -> bool:
        """Whether these rows had that fingerprint under another name of the same data."""
        return any(self._digest(name) == fingerprint for name in self.store.aliases)

    def _digest(self, store: str) -> str:
        digest = blake2b(f"{store} {self.rows.fingerprint()}".encode(), digest_size=16)
        digest.update(np.ascontiguousarray(self.documents, dtype=np.int64).data)
        return digest.hexdigest()


def mismatched(row: RawRow, rows: Rows) -> RawRow:
    """Its prompts, each with the answer of the document before it, and the first with that of the last: all from the
    first token on that is to be predicted. Without segments where fewer than two documents have an answer.

    rows: where it lies. What does not fit any more, as answers of other lengths are padded to other multiples, is cut
    off; a column stays with the tokens of its answer.
    """
    trained = row.trained or [np.ones(len(segment), np.uint8) for segment in row.segments]
    found = [(number, 1 + int(np.argmax(each[1:]))) for number, each in enumerate(trained) if each[1:].any()]
    found = found if len(found) > 1 else []
    taken: list[tuple[int, int, int, int, int]] = []
    filled = 0
    for (own, first), (other, begin) in zip(found, found[-1:] + found[:-1], strict=True):
        answer = len(row.segments[other]) - begin
        answer = min(answer, rows.capacity - filled + 1 - first)
        if answer > 0:
            taken.append((own, first, other, begin, begin + answer))
            filled += -(-(first + answer - 1) // rows.align) * rows.align

    def exchanged(of: list[np.ndarray]) -> list[np.ndarray]:
        return [np.concatenate((of[own][:first], of[other][begin:end])) for own, first, other, begin, end in taken]

    return evolve(
        row,
        segments=exchanged(row.segments),
        trained=exchanged(trained),
        columns={name: exchanged(column) for name, column in row.columns.items()},
        values={name: [value[own] for own, *_ in taken] for name, value in row.values.items()},
    )
