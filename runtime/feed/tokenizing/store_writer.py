"""Crash-safe writing of a token store: a crash costs a few seconds of work, and no document is lost or repeated.

Everything is appended to a few files. At intervals these are synced. Only then is the journal replaced, atomically; it
records the length of each file and the position in the input. A process that resumes checks the files against the
digests in the journal and truncates them to these lengths.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import numpy as np
from attrs import asdict, evolve, field, frozen

from xtrain.regular_files import read_json
from xtrain.runtime.base.files import GrowingFile, replace_file, sync_folder
from xtrain.runtime.feed.records import MOST_SHOWN, BadRecord, BadRecordReport
from xtrain.runtime.feed.token_store import (
    BAD,
    CHOICES,
    COLUMN,
    FIRSTS,
    FORMAT,
    JOURNAL,
    LENGTHS,
    META,
    OFFSETS,
    TOKENS,
    TRAINED,
    VALUE,
    numbers_file,
)
from xtrain.runtime.feed.tokenizing.workers import EncodedUnit

GROWING: Final = (TOKENS, TRAINED, LENGTHS, CHOICES, FIRSTS, BAD)
_AT_ONCE = 1 << 20
_ONES = np.ones(_AT_ONCE, dtype=np.uint8)


@frozen(kw_only=True)
class Journal:
    """Progress of a store, as of the last commit."""

    format: int = FORMAT
    key: str
    dtype: str
    units: int = 0
    """Finished units of the source."""
    mark: str = ""
    """Digest of these units' sizes, to recognize them."""
    done: int = 0
    """Bytes of their input."""
    documents: int = 0
    tokens: int = 0
    trained: int = 0
    """Number of predicted tokens."""
    bad_records: int = 0
    lost: dict[str, int] = field(factory=dict)
    """Number of conversations with left-out content, by its kind."""
    sizes: dict[str, int] = field(factory=dict)
    """Bytes of each file."""
    digests: dict[str, str] = field(factory=dict)
    """Hex digest of each file's content."""


def read_journal(folder: Path, key: str) -> Journal | None:
    """Return the journal of an unfinished store; None without a resumable one."""
    try:
        values = read_json(folder / JOURNAL)
        journal = Journal(**values)
        return journal if journal.format == FORMAT and journal.key == key else None
    except (OSError, ValueError, TypeError):
        return None


class StoreWriter:
    """An unfinished store, in an existing folder of its own. Any method may raise OSError."""

    def __init__(self, folder: Path, key: str, dtype: np.dtype) -> None:
        self.folder = folder
        self.bad_records = BadRecordReport()
        self.journal = Journal(key=key, dtype=dtype.name)
        self._files: dict[str, GrowingFile] = {}
        self._mark = blake2b(digest_size=16)
        self._whole = True

    def begin(self) -> None:
        """Start from nothing: the folder's content is deleted."""
        self.close()
        # The journal first: without it the rest has no meaning.
        for name in (JOURNAL, META, *self._growing(), OFFSETS):
            (self.folder / name).unlink(missing_ok=True)
        self.journal = Journal(key=self.journal.key, dtype=self.journal.dtype)
        self.bad_records, self._mark, self._whole = BadRecordReport(), blake2b(digest_size=16), True
        self._files = {name: GrowingFile(self.folder / name) for name in (TOKENS, LENGTHS, BAD)}

    def resume(self) -> bool:
        """Resume from the journal in the folder; return False if the files do not match it, and `begin` must be
        called."""
        journal = read_journal(self.folder, self.journal.key)
        if journal is None or journal.dtype != self.journal.dtype:
            return False
        for name in (META, OFFSETS, *(name for name in self._growing() if name not in journal.sizes)):
            (self.folder / name).unlink(missing_ok=True)
        self._files = {}
        try:
            for name, size in journal.sizes.items():
                self._files[name] = GrowingFile(self.folder / name)
                self._files[name].cut(size)
            self.bad_records = _report(self.folder / BAD, journal.bad_records)
        except (EOFError, ValueError, KeyError, TypeError):
            return False
        items = {LENGTHS: 8 * journal.documents, TOKENS: np.dtype(journal.dtype).itemsize * journal.tokens}
        optional = {CHOICES: 16 * journal.documents, FIRSTS: 4 * journal.documents}
        optional |= dict.fromkeys(_names(journal.sizes, COLUMN), 4 * journal.tokens)
        optional |= dict.fromkeys(_names(journal.sizes, VALUE), 4 * journal.documents)
        items |= {name: size for name, size in optional.items() if name in journal.sizes}
        items |= {BAD: journal.sizes.get(BAD)} | ({TRAINED: journal.tokens} if TRAINED in journal.sizes else {})
        if journal.sizes != items or self._digests() != journal.digests:
            return False
        self.journal = journal
        return True

    def knows(self, sizes: Iterable[int]) -> bool:
        """Return True if the first units have these sizes, in this order, according to the journal."""
        self._mark = blake2b(digest_size=16)
        for size in sizes:
            self._mark.update(b"%d," % size)
        return self._mark.hexdigest() == self.journal.mark or not self.journal.units

    def append(self, unit_size: int, encoded: EncodedUnit) -> None:
        """Append the documents of the next unit."""
        # After an interruption only the journal has the valid lengths.
        self._whole = False
        now = self.journal
        if encoded.trained is not None and TRAINED not in self._files:
            self._files[TRAINED] = GrowingFile(self.folder / TRAINED)
            self._append_ones(now.tokens)
        self._files[TOKENS].append(encoded.tokens.data)
        self._files[LENGTHS].append(encoded.lengths.data)
        if encoded.trained is not None:
            self._files[TRAINED].append(encoded.trained.data)
        elif TRAINED in self._files:
            self._append_ones(len(encoded.tokens))
        others = {CHOICES: encoded.choices, FIRSTS: encoded.firsts}
        others |= {numbers_file(COLUMN, name): column for name, column in encoded.columns.items()}
        others |= {numbers_file(VALUE, name): value for name, value in encoded.values.items()}
        for name, content in others.items():
            if content is None:
                continue
            if name not in self._files:
                self._files[name] = GrowingFile(self.folder / name)
            self._files[name].append(content.data)
        for record in encoded.bad:
            self.bad_records = self.bad_records.including(record)
            line = json.dumps({"origin": record.origin, "reason": record.reason}, ensure_ascii=False)
            # A file name need not be valid text.
            self._files[BAD].append(line.encode(errors="surrogateescape") + b"\n")
        self._mark.update(b"%d," % unit_size)
        predicted = len(encoded.tokens) if encoded.trained is None else int(encoded.trained.sum())
        self.journal = evolve(
            now,
            units=now.units + 1,
            done=now.done + unit_size,
            documents=now.documents + len(encoded.lengths),
            tokens=now.tokens + len(encoded.tokens),
            trained=now.trained + predicted,
            bad_records=self.bad_records.count,
            lost={kind: now.lost.get(kind, 0) + encoded.lost.get(kind, 0) for kind in (*now.lost, *encoded.lost)},
        )
        self._whole = True

    def commit(self) -> None:
        """Sync all files, then replace the journal; does nothing after an interrupted `append`."""
        if not self._whole or not self._files or not self.journal.units:
            return
        for file in self._files.values():
            file.sync()
        sizes = {name: file.size for name, file in self._files.items()}
        self.journal = evolve(self.journal, mark=self._mark.hexdigest(), sizes=sizes, digests=self._digests())
        replace_file(self.folder / JOURNAL, json.dumps(asdict(self.journal)).encode())

    def finish(self, **meta: Any) -> None:
        """Complete the store, with `meta` added to its metadata; at least one document is needed."""
        self.commit()
        digests = self._digests()
        digests[OFFSETS] = _write_offsets(self.folder, self.journal.documents)
        del digests[LENGTHS]
        now = self.journal
        self.close()
        if not now.bad_records:
            del digests[BAD]
            (self.folder / BAD).unlink(missing_ok=True)
        shown = [[record.origin, record.reason] for record in self.bad_records.first]
        content = {
            "format": FORMAT,
            "dtype": now.dtype,
            "documents": now.documents,
            "tokens": now.tokens,
            "trained_tokens": now.trained,
            "masked": TRAINED in now.sizes,
            **({"choices": True} if CHOICES in now.sizes else {}),
            **({"pairs": True} if FIRSTS in now.sizes else {}),
            **{
                f"{kind}s": [name.removeprefix(f"{kind}-").removesuffix(".bin") for name in names]
                for kind in (COLUMN, VALUE)
                if (names := _names(now.sizes, kind))
            },
            **meta,
            **({"lost": now.lost} if now.lost else {}),
            "bad_records": {"count": now.bad_records, "first": shown},
            "digests": digests,
        }
        replace_file(self.folder / META, json.dumps(content, indent=1).encode())
        tidy(self.folder)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}

    def _digests(self) -> dict[str, str]:
        return {name: file.digest.hexdigest() for name, file in self._files.items()}

    def _growing(self) -> list[str]:
        """Return the names of growing files that may be in the folder."""
        numbers = (path.name for kind in (COLUMN, VALUE) for path in self.folder.glob(numbers_file(kind, "*")))
        return [*GROWING, *numbers]

    def _append_ones(self, count: int) -> None:
        for first in range(0, count, _AT_ONCE):
            self._files[TRAINED].append(_ONES[: min(_AT_ONCE, count - first)].data)


def _names(files: Iterable[str], kind: str) -> list[str]:
    """Return the files of columns, or of values."""
    return sorted(name for name in files if name.startswith(f"{kind}-"))


def tidy(folder: Path) -> None:
    """Delete files that only an unfinished store needs."""
    for name in (JOURNAL, LENGTHS):
        (folder / name).unlink(missing_ok=True)
    sync_folder(folder)


def copy_unfinished(source: Path, target: Path, key: str, report: Callable[[int], None]) -> bool:
    """Copy the journal and its files, which may still be growing, from `source` into the empty folder `target`.

    `report` gets the bytes of each block. Returns False if there is nothing to copy.
    """
    journal = read_journal(source, key)
    if journal is None:
        return False
    with suppress(FileNotFoundError):
        for name, size in journal.sizes.items():
            with (source / name).open("rb") as old, (target / name).open("wb") as new:
                left = size
                while left and (block := old.read(min(left, 1 << 22))):
                    new.write(block)
                    left -= len(block)
                    report(len(block))
                new.flush()
                os.fsync(new.fileno())
        replace_file(target / JOURNAL, json.dumps(asdict(journal)).encode())
        return True
    return False


def _report(path: Path, count: int) -> BadRecordReport:
    first = []
    with path.open(encoding="utf-8", errors="surrogateescape") as lines:
        for line, _ in zip(lines, range(MOST_SHOWN), strict=False):
            record = json.loads(line)
            first.append(BadRecord(origin=record["origin"], reason=record["reason"]))
    if len(first) != min(count, MOST_SHOWN):
        raise ValueError(f"{path} has {len(first)} records")
    return BadRecordReport(count=count, first=tuple(first))


def _write_offsets(folder: Path, documents: int) -> str:
    """Write the cumulative lengths as an array file, block by block. Returns the file's digest."""
    header = {"descr": "<i8", "fortran_order": False, "shape": (documents + 1,)}
    with (folder / OFFSETS).open("w+b") as file, (folder / LENGTHS).open("rb") as lengths:
        np.lib.format.write_array_header_1_0(file, header)
        file.write(np.zeros(1, "<i8").data)
        last = 0
        while block := lengths.read(8 * _AT_ONCE):
            sums = np.cumsum(np.frombuffer(block, dtype=np.int64)) + last
            last = int(sums[-1])
            file.write(sums.astype("<i8", copy=False).data)
        file.flush()
        os.fsync(file.fileno())
        file.seek(0)
        return hashlib.file_digest(file, lambda: blake2b(digest_size=32)).hexdigest()
