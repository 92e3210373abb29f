"""Packed rows on disk, cached under the hash of everything that they depend on, and `RowReader`, which reads them.

`cached_split` chooses the documents that are held out for evaluation.
"""

import json
import os
from collections.abc import Callable
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import numpy as np
from attrs import define, evolve, field, frozen

from xtrain.plan.canonical import DATA, digest
from xtrain.regular_files import read_json
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.base.files import ATTEMPTS, make_folder
from xtrain.runtime.feed.packing.rows import Rows, cut_sides, sides_of
from xtrain.runtime.feed.token_store import TokenStore

# Part of every key: raise it whenever the same documents and settings would be packed differently.
FORMAT = 2
ARRAYS: Final = ("document", "row_offsets", "cut_segments", "cut_starts")
NUMBERS: Final = (
    "capacity", "align", "num_positions", "num_truncated", "num_skipped", "num_empty", "num_dropped_positions",
)  # fmt: skip


def rows_key(**depends_on: Any) -> str:
    """Return the hex name of rows, from the JSON values that determine them: the store, the choice of documents, the
    packing."""
    return digest([FORMAT, depends_on], DATA, size=16)


def cached_rows(folder: Path, pack: Callable[[], Rows]) -> Rows:
    """Open the rows in `folder`, calling `pack` first if they are missing or damaged.

    Raises what `pack` raises, and DataError if the folder cannot be written.
    """
    for _ in range(ATTEMPTS):
        rows = open_rows(folder)
        if rows is not None:
            return rows
        _add_rows(pack(), folder)
        # The system can drop mapped pages from memory at any time, and all ranks share them.
    raise DataError("packed rows were damaged while they were written", path=folder, remedy="Check this file system.")


def open_rows(folder: Path) -> Rows | None:
    """Return the rows in `folder`, or None if any part of them is missing, unreadable or changed."""
    try:
        meta = read_json(folder / "meta.json")
        values: dict[str, Any] = {name: _map_array(folder / f"{name}.npy") for name in ARRAYS}
        values |= {name: int(meta[name]) for name in NUMBERS}
        rows = Rows(**values)
        # The fingerprint covers only bytes, not their types.
        shapes = all(values[name].ndim == 1 and values[name].dtype in (np.int32, np.int64) for name in ARRAYS)
        intact = shapes and meta["format"] == FORMAT and meta["fingerprint"] == rows.fingerprint()
        return rows if intact else None
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None


def num_rows(folder: Path) -> int | None:
    """Return the number of rows in `folder` without reading them; None without rows of this format."""
    try:
        if read_json(folder / "meta.json")["format"] != FORMAT:
            return None
        return len(_map_array(folder / "row_offsets.npy")) - 1
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None


def _add_rows(rows: Rows, folder: Path) -> None:
    try:
        make_folder(folder, lambda partial: _write_rows(rows, partial), lambda there: open_rows(there) is not None)
    except OSError as error:
        remedy = "Free some space or choose another cache folder."
        raise DataError(f"cannot write packed rows: {error}", path=folder, remedy=remedy) from error


def _map_array(path: Path) -> np.ndarray:
    # A plain array over the mapping: slicing a memmap object costs several times as much. An empty array cannot be
    # mapped.
    mapped = np.load(path, mmap_mode="r", allow_pickle=False) if path.stat().st_size > 128 else np.load(path)
    return np.asarray(mapped)


def _write_rows(rows: Rows, folder: Path) -> None:
    for name in ARRAYS:
        with (folder / f"{name}.npy").open("wb") as file:
            np.save(file, getattr(rows, name), allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
    meta = {"format": FORMAT, "fingerprint": rows.fingerprint(), **{name: getattr(rows, name) for name in NUMBERS}}
    with (folder / "meta.json").open("wb") as file:
        file.write(json.dumps(meta, indent=1).encode())
        file.flush()
        os.fsync(file.fileno())


# Row orders key the same generator by (seed, epoch); no epoch gets this far, so the two never share a stream.
STREAM = 2**64 - 1


def split_holdout(offsets: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split documents into (training, held out), both int64 [documents of that part], ascending.

    `offsets` int64 [documents + 1] are token offsets. Documents are held out in a seeded random order until they have
    `fraction` of all tokens: at least one if `fraction` > 0, at most all but one if `fraction` < 1. The result depends
    only on the three arguments.

    Raises DataError if `fraction` is outside [0, 1], or for a single document that would have to be in both parts.
    """
    if not 0.0 <= fraction <= 1.0:
        raise DataError(f"hold-out fraction {fraction} is outside 0 to 1")
    lengths = np.diff(offsets)
    documents = np.arange(len(lengths), dtype=np.int64)
    if fraction == 0.0:
        return documents, documents[:0]
    if fraction == 1.0:
        return documents[:0], documents
    if len(documents) < 2:
        raise DataError(
            f"{len(documents)} document cannot be split into training and hold-out",
            remedy="Add documents, or set the hold-out fraction to 0 or 1.",
        )
    key = np.array([seed, STREAM], dtype=np.uint64)
    shuffled = np.random.Generator(np.random.Philox(key=key)).permutation(documents)
    heldout_tokens = np.cumsum(lengths[shuffled])
    enough = int(np.searchsorted(heldout_tokens, fraction * heldout_tokens[-1])) + 1
    count = min(enough, len(documents) - 1)
    return np.sort(shuffled[count:]), np.sort(shuffled[:count])


# on disk -------------------------------------------------------------------------------------------------------------


FILES = ("training.npy", "heldout.npy")
Split = tuple[np.ndarray, np.ndarray]


def cached_split(
    store: TokenStore, cache: Path, holdout: float, seed: int, left_out: np.ndarray | None = None, key: str = ""
) -> Split:
    """Return (training, held out) of `split_holdout`, computed now if it is not in `cache`.

    left_out: int64, documents in neither part; key: names them. Raises DataError as `split_holdout` does, and if the
    cache cannot be written.
    """
    depends_on = {"store": store.folder, "documents": store.num_documents, "holdout": holdout, "seed": seed}
    folder = cache / f"split-{rows_key(**depends_on, **({'left_out': key} if key else {}))}"
    removed = np.empty(0, dtype=np.int64) if left_out is None else left_out
    count = store.num_documents - len(removed)
    for _ in range(ATTEMPTS):
        if (known := _open_split(folder, count)) is not None:
            return known
        split = _split_without(store, removed, holdout, seed)
        try:
            make_folder(
                folder,
                lambda partial, split=split: _write_split(split, partial),
                lambda there: _open_split(there, count) is not None,
            )
        except OSError as error:
            remedy = "Free some space or choose another cache folder."
            raise DataError(
                f"cannot write which documents are held out: {error}", path=folder, remedy=remedy
            ) from error
    raise DataError("the file was damaged while it was written", path=folder, remedy="Check this file system.")


def _split_without(store: TokenStore, removed: np.ndarray, holdout: float, seed: int) -> Split:
    if not len(removed):
        return split_holdout(store.offsets, holdout, seed)
    kept = np.setdiff1d(np.arange(store.num_documents), removed, assume_unique=True)
    offsets = np.concatenate(([0], np.cumsum(store.lengths_of(kept))))
    training, heldout = split_holdout(offsets, holdout, seed)
    return kept[training], kept[heldout]


def _open_split(folder: Path, documents: int) -> Split | None:
    """Return the split in the folder, or None if it is missing or damaged."""
    try:
        training, heldout = (np.asarray(np.load(folder / name, mmap_mode="r", allow_pickle=False)) for name in FILES)
        intact = training.dtype == heldout.dtype == np.int64 and len(training) + len(heldout) == documents
        return (training, heldout) if intact else None
    except (OSError, ValueError, EOFError):
        return None


def _write_split(split: Split, folder: Path) -> None:
    for name, documents in zip(FILES, split, strict=True):
        with (folder / name).open("wb") as file:
            np.save(file, documents, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())


# Number of a row of padding only.
PADDING: Final = -1
# The dataset or place of a row that needs none.
UNKNOWN: Final = -1


@frozen(kw_only=True, eq=False)
class RawRow:
    """A packed row as it is stored."""

    segments: list[np.ndarray]
    """Views into the store; L positions come with L + 1 tokens, the last a label."""
    trained: list[np.ndarray] | None = None
    """uint8 [L + 1] per segment: 1 for predicted tokens. None: all of them are."""
    columns: dict[str, list[np.ndarray]] = field(factory=dict)
    """Numbers per token of each segment, float32 or float64 [L + 1], or several per token [L + 1, width], by name."""
    values: dict[str, list[float]] = field(factory=dict)
    """Numbers of the document of each segment, by name."""
    sides: list[int] | None = None
    """For each segment 0 for the preferred side of a pair, 1 for the other side after it. None: there are no pairs."""
    dataset: int = UNKNOWN
    """Number of its dataset among the training datasets; UNKNOWN if there is only one, and in evaluation."""
    position: int = UNKNOWN
    """Number of rows of the run before it; UNKNOWN in evaluation."""


@define(kw_only=True, frozen=True, eq=False)
class RowReader:
    """Reader of the tokens of packed rows."""

    store: TokenStore
    documents: np.ndarray
    """int64: document index in `rows` → document of the store."""
    rows: Rows

    def row(self, index: int, *, dataset: int = UNKNOWN, position: int = UNKNOWN) -> RawRow:
        """Return row `index`, without segments for PADDING, with this `dataset` and `position`."""
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

    def without(self, removed: np.ndarray) -> Rows:
        """Return the same number of rows without the segments of some documents; later segments of a row move up.

        removed: int64, documents of the store.
        """
        rows = self.rows
        kept = ~np.isin(self.documents[rows.document], removed)
        cut = kept[rows.cut_segments]
        # The number of a segment is the number of kept segments before it.
        before = np.concatenate(([0], np.cumsum(kept)))
        touched = np.unique(np.searchsorted(rows.row_offsets, np.flatnonzero(~kept), side="right") - 1)
        cuts = ((document, one) for row in touched for document, one in zip(*self._cuts(int(row)), strict=True))
        lost = sum(one.stop - one.start - 1 for document, one in cuts if document in removed)
        return evolve(
            rows,
            document=rows.document[kept],
            row_offsets=before[rows.row_offsets].astype(rows.row_offsets.dtype),
            cut_segments=before[rows.cut_segments[cut]],
            cut_starts=rows.cut_starts[cut],
            num_positions=rows.num_positions - lost,
            packed_as=rows.fingerprint(),
        )

    def labels_at(self, index: int, *, exchanged: bool) -> np.ndarray:
        """Return the store's token of each label of a row, int64 [capacity]; -1 without label.

        exchanged: in the row that `mismatched` returns.
        """
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
        """Return the document of each segment of a row, int64, and its tokens in the store."""
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
        """Return the first token and the end of each side of pairs, int64 [2 · documents] both."""
        rows, firsts = self.rows, self.store.firsts
        assert firsts is not None
        begin = self.store.offsets[documents]
        first = np.stack([begin, begin + firsts[documents]], axis=1).ravel()
        positions = cut_sides(*sides_of(self.store, documents), rows.capacity, rows.align)
        return first, first + np.stack(positions, axis=1).ravel() + 1

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of every row's content: the store's, the choice of documents, and their packing; with the
        documents that are removed from the packed rows, so that a position in the rows stays valid."""
        return self._digest(self.store.key)

    def was_called(self, fingerprint: str) -> bool:
        """Return True if these rows have that fingerprint under another name of the same data."""
        return any(self._digest(name) == fingerprint for name in self.store.aliases)

    def _digest(self, store: str) -> str:
        digest = blake2b(f"{store} {self.rows.packed_as or self.rows.fingerprint()}".encode(), digest_size=16)
        digest.update(np.ascontiguousarray(self.documents, dtype=np.int64).data)
        return digest.hexdigest()


def mismatched(row: RawRow, rows: Rows) -> RawRow:
    """Return the row with each prompt followed by the answer of the document before it, the first by the last one's.

    An answer begins with the first predicted token. No segments if fewer than two documents have an answer. rows: where
    the row is. What no longer fits, as answers of other lengths are padded differently, is cut off; a column stays with
    the tokens of its answer.
    """
    trained = row.trained or [np.ones(len(segment), np.uint8) for segment in row.segments]
    answers = [(number, 1 + int(np.argmax(mask[1:]))) for number, mask in enumerate(trained) if mask[1:].any()]
    answers = answers if len(answers) > 1 else []
    taken: list[tuple[int, int, int, int, int]] = []
    filled = 0
    for (own, first), (other, begin) in zip(answers, answers[-1:] + answers[:-1], strict=True):
        answer = len(row.segments[other]) - begin
        answer = min(answer, rows.capacity - filled + 1 - first)
        if answer > 0:
            taken.append((own, first, other, begin, begin + answer))
            filled += -(-(first + answer - 1) // rows.align) * rows.align

    def exchanged(parts: list[np.ndarray]) -> list[np.ndarray]:
        return [
            np.concatenate((parts[own][:first], parts[other][begin:end])) for own, first, other, begin, end in taken
        ]

    return evolve(
        row,
        segments=exchanged(row.segments),
        trained=exchanged(trained),
        columns={name: exchanged(column) for name, column in row.columns.items()},
        values={name: [value[own] for own, *_ in taken] for name, value in row.values.items()},
    )
