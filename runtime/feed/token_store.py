"""Token stores: a tokenized dataset as one flat array, cached on disk under the hash of everything that it depends on.

`DataProgress` and `ReadingPace` describe the progress of building a store, for commands and for the events of a run.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from attrs import Factory, define, evolve, field, frozen

from xtrain.regular_files import read_json
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.digests import file_digest
from xtrain.runtime.feed.records import BadRecord, BadRecordReport
from xtrain.text.units import bytes_text, rate_text, seconds_text

Stage = Literal["files", "tokens", "waiting"]


@frozen(kw_only=True)
class DataProgress:
    """Progress of a build.

    Stage `files`: hashing files. `tokens`: reading and tokenizing. `waiting`: another process builds.
    """

    stage: Stage
    done: int = 0
    """Bytes of the input so far."""
    total: int | None = None
    """Bytes of the input; None if unknown."""
    documents: int = 0
    tokens: int = 0
    bad_records: int = 0
    resumed: int = 0
    """Bytes of the input that an earlier, interrupted build had done."""
    builder: str = ""
    """The process that builds while this one waits."""

    @property
    def share(self) -> float | None:
        """Done part, 0 to 1; None if unknown."""
        return min(self.done / self.total, 1.0) if self.total else None


Report = Callable[[DataProgress], None]


@define
class ReadingPace:
    """Rates and time left, from the progress since it began to look."""

    _stage: str = ""
    _begun: float = 0.0
    _first: DataProgress | None = None
    clock: Callable[[], float] = time.monotonic
    bytes_per_second: float | None = field(default=None, init=False)
    tokens_per_second: float | None = field(default=None, init=False)
    seconds_left: float | None = field(default=None, init=False)

    def look(self, now: DataProgress) -> None:
        if self._first is None or now.stage != self._stage or now.done < self._first.done:
            self._stage, self._begun, self._first = now.stage, self.clock(), now
            self.bytes_per_second = self.tokens_per_second = self.seconds_left = None
            return
        seconds = self.clock() - self._begun
        if seconds <= 0:
            return
        self.bytes_per_second = (now.done - self._first.done) / seconds
        self.tokens_per_second = (now.tokens - self._first.tokens) / seconds
        if now.total is not None and self.bytes_per_second > 0:
            self.seconds_left = max(now.total - now.done, 0) / self.bytes_per_second


def in_words(now: DataProgress, pace: ReadingPace) -> str:
    """Return one line for a log: the done part, the time left, and the rates."""
    doing = {"files": "reading files", "tokens": "tokenizing", "waiting": f"waiting for {now.builder}, which tokenizes"}
    done = bytes_text(now.done)
    parts = [f"{doing[now.stage]}: {done if now.share is None else f'{now.share:.0%} of {bytes_text(now.total or 0)}'}"]
    if pace.seconds_left is not None:
        parts.append(f"{seconds_text(pace.seconds_left)} left")
    if pace.bytes_per_second:
        parts.append(rate_text(pace.bytes_per_second, "B/s"))
    if pace.tokens_per_second:
        parts.append(f"{pace.tokens_per_second:,.0f} tokens/s")
    if now.documents:
        parts.append(f"{now.documents:,} documents of {now.tokens:,} tokens")
    if now.bad_records:
        parts.append(f"{now.bad_records:,} bad records")
    return " · ".join(parts)


def every(
    seconds: float, write: Callable[[str, DataProgress], None], clock: Callable[[], float] = time.monotonic
) -> Report:
    """Return a report for long builds: `write` gets a line and the progress every `seconds`, first after `seconds`."""
    pace, due = ReadingPace(clock=clock), clock() + seconds

    def report(now: DataProgress) -> None:
        nonlocal due
        pace.look(now)
        if clock() >= due:
            due = clock() + seconds
            write(in_words(now, pace), now)

    return report


# Part of every key: raise it whenever the same source and tokenizer would give other files.
FORMAT = 2


TOKENS, TRAINED, LENGTHS, BAD, OFFSETS = "tokens.bin", "trained.bin", "lengths.bin", "bad_records.jsonl", "offsets.npy"
CHOICES, FIRSTS = "choices.bin", "firsts.bin"
COLUMN, VALUE = "column", "value"


def numbers_file(kind: str, name: str) -> str:
    """Return the file of a column (COLUMN) or of a value (VALUE) in the folder of a store."""
    return f"{kind}-{name}.bin"


META, JOURNAL = "meta.json", "journal.json"


_AT_ONCE = 1 << 16


@define(kw_only=True, frozen=True, eq=False)
class TokenStore:
    """Documents as tokens, each laid out `bos, text…, eos`, one after the other in `tokens`."""

    key: str
    """Hex digest of its content; the same for the same data, whatever its folder is called."""
    tokens: np.ndarray
    """uint16 or uint32 [tokens], mapped from disk and read-only."""
    offsets: np.ndarray
    """int64 [documents + 1]: document i is tokens[offsets[i] : offsets[i + 1]]."""
    num_files: int
    """Number of files that were read."""
    bad_records: BadRecordReport
    """Records without a document, from when the store was built."""
    trained: np.ndarray | None = None
    """uint8 [tokens], mapped and read-only: 1 for predicted tokens. None: all of them are."""
    choices: np.ndarray | None = None
    """int32 [documents, 4], mapped and read-only: `TokenDocument.choice`. None: documents are no choices."""
    firsts: np.ndarray | None = None
    """int32 [documents], mapped and read-only: number of tokens of the pair's preferred side, which comes first. None:
    documents are no pairs."""
    columns: Mapping[str, np.ndarray] = field(factory=dict)
    """Numbers per token, float32 [tokens] each, mapped and read-only, by name; columns of the run may be float64, and a
    teacher's are int32 or float32 [tokens, width]."""
    values: Mapping[str, np.ndarray] = field(factory=dict)
    """Numbers of the documents, float32 [documents] each, mapped and read-only, by name."""
    lost: Mapping[str, int] = field(factory=dict)
    """Number of conversations with left-out content, by its kind."""
    aliases: tuple[str, ...] = ()
    """Other names of the same data, in checkpoints and in the cache."""
    folder: str = field(default=Factory(lambda self: self.key, takes_self=True))
    """Name of its folder in the cache: `key`, or one of `aliases`."""

    @property
    def names(self) -> tuple[str, ...]:
        """`key` and `aliases`."""
        return (self.key, *self.aliases)

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def is_plain(self) -> bool:
        """True if it has only tokens and their masks: no pairs, and no numbers."""
        return self.firsts is None and not self.columns and not self.values

    def lengths(self) -> np.ndarray:
        """Return the tokens of each document, bos and eos included, int64 [documents]."""
        return np.diff(self.offsets)

    def lengths_of(self, documents: np.ndarray) -> np.ndarray:
        """Return the tokens of some documents, bos and eos included, int64 [documents]; takes no more memory than the
        result."""
        lengths = np.empty(len(documents), dtype=np.int64)
        for first in range(0, len(documents), _AT_ONCE):
            some = documents[first : first + _AT_ONCE]
            np.subtract(self.offsets[some + 1], self.offsets[some], out=lengths[first : first + _AT_ONCE])
        return lengths

    def predicted(self) -> np.ndarray:
        """Return the number of predicted tokens of each document, int64 [documents]; needs masks."""
        assert self.trained is not None
        return np.add.reduceat(self.trained, self.offsets[:-1], dtype=np.int64)

    def document(self, index: int) -> np.ndarray:
        """Return the tokens of one document, a view."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]


def open_named(cache: Path, names: Sequence[str]) -> TokenStore | None:
    """Return the first intact store in `cache` with one of the `names` of the same data; the first name is its key."""
    key, *aliases = names
    for name in names:
        if (store := open_store(cache / name)) is not None:
            return evolve(store, key=key, aliases=tuple(aliases))
    return None


def open_store(directory: Path) -> TokenStore | None:
    """Return the store in `directory`, or None if any part of it is missing, unreadable or of the wrong size."""
    try:
        meta = read_json(directory / META)
        count, dtype = int(meta["tokens"]), np.dtype(meta["dtype"])
        offsets = np.asarray(np.load(directory / OFFSETS, mmap_mode="r", allow_pickle=False))
        # A plain array over the mapping: slicing a memmap object costs several times as much.
        tokens = np.asarray(np.memmap(directory / TOKENS, dtype=dtype, mode="r"))
        trained = np.asarray(np.memmap(directory / TRAINED, dtype=np.uint8, mode="r")) if meta["masked"] else None
        choices = None
        if meta.get("choices", False):
            choices = np.asarray(np.memmap(directory / CHOICES, dtype=np.int32, mode="r")).reshape(-1, 4)
        firsts = _mapped(directory / FIRSTS, np.int32) if meta.get("pairs", False) else None
        columns = {name: _mapped(directory / numbers_file(COLUMN, name)) for name in meta.get("columns", ())}
        values = {name: _mapped(directory / numbers_file(VALUE, name)) for name in meta.get("values", ())}
        bad = meta["bad_records"]
        first = tuple(BadRecord(origin=origin, reason=reason) for origin, reason in bad["first"])
        report = BadRecordReport(count=int(bad["count"]), first=first)
        intact = (
            meta["format"] == FORMAT
            and dtype in (np.uint16, np.uint32)
            and offsets.shape == (meta["documents"] + 1,)
            and offsets.dtype == np.int64
            and len(tokens) == count == offsets[-1]
            and offsets[0] == 0
            and (trained is None or len(trained) == count)
            and (choices is None or len(choices) == meta["documents"])
            and (firsts is None or len(firsts) == meta["documents"])
            and all(len(column) == count for column in columns.values())
            and all(len(value) == meta["documents"] for value in values.values())
            and (directory / BAD).is_file() == (report.count > 0)
            and all(bool(np.all(lengths > 0)) for lengths in _lengths(offsets))
        )
        files = int(meta["files"])
        lost = {str(kind): int(count) for kind, count in meta.get("lost", {}).items()}
    except (OSError, ValueError, KeyError, TypeError, EOFError, IndexError, AttributeError):
        return None
    if not intact:
        return None
    return TokenStore(
        key=directory.name, tokens=tokens, offsets=offsets, num_files=files, bad_records=report, trained=trained,
        choices=choices, firsts=firsts, columns=columns, values=values, lost=lost,
    )  # fmt: skip


def _mapped(path: Path, dtype: type = np.float32) -> np.ndarray:
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))


def damage(directory: Path, progress: Report | None = None) -> list[str]:
    """Return the names of a store's files whose content has changed since they were written; reads all of them."""
    try:
        digests = dict(read_json(directory / META)["digests"])
    except (OSError, ValueError, KeyError, TypeError):
        return [META]
    changed = []
    total = sum(path.stat().st_size for path in directory.iterdir())
    done = 0
    for name, written in digests.items():
        try:
            if file_digest(directory / name) != written:
                changed.append(name)
            done += (directory / name).stat().st_size
        except (DataError, OSError):
            changed.append(name)
        if progress is not None:
            progress(DataProgress(stage="files", done=done, total=total))
    if open_store(directory) is None and not changed:
        changed.append(META)
    return changed


def _lengths(offsets: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the lengths of documents in blocks: for a billion, all at once take as much memory as the offsets."""
    for first in range(0, len(offsets) - 1, _AT_ONCE):
        yield np.diff(offsets[first : first + _AT_ONCE + 1])
