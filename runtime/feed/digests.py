"""Content digests of files, cached by size, times and inode, so that a terabyte is read only once."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from uuid import uuid4

from attrs import define, field, frozen

from xtrain.runtime.base.errors import DataError
from xtrain.runtime.base.files import PARTIAL_PREFIX as PARTIAL

THREADS = 8
TRIES = 3
# A file written less than this before it was read may change again within the same clock tick; two seconds is the
# coarsest one in use. A remembered stamp of such a file proves nothing.
TICK_NS = 2_000_000_000
FORMAT = 1
MOST_FILES = 1 << 20  # kept in the index


@frozen
class Stamp:
    """Facts that change when a file does; times in nanoseconds."""

    size: int
    modified: int
    changed: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> "Stamp":
        status = path.stat()
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)

    def settled(self, at: int) -> bool:
        """Return True if a change after the time `at` would change the stamp."""
        return max(self.modified, self.changed) + TICK_NS <= at


@define
class FileDigests:
    """Digests by path. Any number of threads may share one, and any number of processes one index."""

    index: Path | None = None
    """File that keeps the digests; None for none."""
    _table: dict[str, tuple[Stamp, str]] = field(factory=dict, init=False)
    _fresh: dict[str, tuple[Stamp, str]] = field(factory=dict, init=False)
    _unsettled: dict[str, tuple[Stamp, str]] = field(factory=dict, init=False)
    _lock: Lock = field(factory=Lock, init=False)

    def __attrs_post_init__(self) -> None:
        self._table = {} if self.index is None else _load(self.index)

    def digest(self, path: Path) -> str:
        """Return the hex digest of a file's content; it is read unless its stamp is the remembered one.

        Raises DataError if it cannot be read, or is being written all the time.
        """
        name = str(path.absolute())
        known = self._known(path)
        if known is not None:
            return known
        stamp, digest, settled = _read(path)
        with self._lock:
            (self._fresh if settled else self._unsettled)[name] = (stamp, digest)
        return digest

    def learn(self, paths: Iterable[Path], progress: Callable[[int, int], None] | None = None) -> None:
        """Read files without remembered digests, in threads. progress: called with the bytes read and the total."""
        unknown = [(path, _size(path)) for path in paths if self._known(path) is None]
        # Large files first, so that the threads end at about the same time.
        unknown.sort(key=lambda entry: -entry[1])
        total, done = sum(size for _, size in unknown), 0
        threads = min(THREADS, os.cpu_count() or 1, max(len(unknown), 1))
        with ThreadPoolExecutor(threads) as pool:
            try:
                for size in pool.map(lambda entry: (self.digest(entry[0]), entry[1])[1], unknown):
                    done += size
                    if progress is not None:
                        progress(done, total)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def unread_bytes(self, paths: Iterable[Path]) -> int:
        """Return the bytes of the files without remembered digests. Raises DataError if one does not exist."""
        return sum(_size(path) for path in paths if self._known(path) is None)

    def save(self) -> None:
        """Add new digests to the index, with those of other processes; a failure is ignored."""
        if self.index is None or not self._fresh:
            return
        table = _load(self.index) | self._fresh
        with suppress(OSError):
            self.index.parent.mkdir(parents=True, exist_ok=True)
            _write(self.index, dict(list(table.items())[-MOST_FILES:]))
        self._table, self._fresh = table, {}

    def _known(self, path: Path) -> str | None:
        name = str(path.absolute())
        for table in (self._table, self._fresh, self._unsettled):
            if name in table:
                stamp, digest = table[name]
                with suppress(OSError):
                    if Stamp.of(path) == stamp:
                        return digest
        return None


_CURRENT: ContextVar[FileDigests | None] = ContextVar("digests", default=None)


@contextmanager
def remembering(digests: FileDigests) -> Iterator[None]:
    """Let `file_digest` look into `digests` first within the block; save them at its end."""
    token = _CURRENT.set(digests)
    try:
        yield
    finally:
        _CURRENT.reset(token)
        digests.save()


def file_digest(path: Path) -> str:
    """Return the hex digest of a file's content, remembered within `remembering`. Raises DataError if it cannot be
    read."""
    return (_CURRENT.get() or FileDigests()).digest(path)


def _read(path: Path) -> tuple[Stamp, str, bool]:
    try:
        for _ in range(TRIES):
            begun = time.time_ns()
            before = Stamp.of(path)
            digest = _digest(path)
            if Stamp.of(path) == before:
                return before, digest, before.settled(begun)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", path=path) from error
    raise DataError("is being written while it is read", path=path, remedy="Wait until the file is complete.")


def _digest(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, lambda: blake2b(digest_size=32)).hexdigest()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", path=path) from error


def _load(index: Path) -> dict[str, tuple[Stamp, str]]:
    """Return the index's content; empty if the file is damaged."""
    try:
        head, _, body = index.read_bytes().partition(b"\n")
        if head != _head(body):
            return {}
        return {name: (Stamp(*numbers), digest) for name, (*numbers, digest) in json.loads(body).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write(index: Path, table: dict[str, tuple[Stamp, str]]) -> None:
    rows = {
        name: [stamp.size, stamp.modified, stamp.changed, stamp.inode, digest]
        for name, (stamp, digest) in table.items()
    }
    body = json.dumps(rows, separators=(",", ":")).encode()
    rest = index.with_name(f"{PARTIAL}{index.name}-{uuid4().hex}")
    try:
        rest.write_bytes(_head(body) + b"\n" + body)
        rest.replace(index)
    finally:
        rest.unlink(missing_ok=True)


def _head(body: bytes) -> bytes:
    return f"xtrain files {FORMAT} {blake2b(body, digest_size=16).hexdigest()}".encode()
