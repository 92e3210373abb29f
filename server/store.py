"""State and journal as one: nothing changes without an entry, and entries are in the order of the changes."""

import fcntl
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from .entries import Accepted, Change, ChangedEntry, Done, decoded, encoded
from .journal import JournalFailed, RequestJournal, Then
from .state import QueuedWork, Result, State

LOG = logging.getLogger(__name__)

# A journal is rewritten once it has grown to so many times what it was after the last time, and so many bytes.
GROWTH: Final = 4
LEAST: Final = 64 * 2**20

T = TypeVar("T")


def fulfils(promise: "Future[T]", value: T) -> Then:
    """Fulfils a promise once a frame lasts; where it never will whoever waits gets JournalFailed."""

    def then(lasting: bool) -> None:
        if lasting:
            promise.set_result(value)
        else:
            promise.set_exception(JournalFailed("the disk has refused a frame"))

    return then


class StoreUnreadable(Exception):
    """The folder has a journal that this version does not read."""


class StoreInUse(Exception):
    """Another server has the folder."""


class Store:
    """What a server knows, and the folders of its weights. Its lock guards all of it; `changed` is for who waits.
    finished: is told of every request that is done.

    folder/journal: entries. folder/weights/ID: what an engine has saved or exported.
    """

    def __init__(
        self,
        folder: Path,
        clock: Callable[[], float] = time.time,
        failed: Callable[[OSError], None] = lambda error: None,
        finished: Callable[[QueuedWork, Done], None] = lambda work, done: None,
    ) -> None:
        self.folder, self.clock, self._finished = folder, clock, finished
        self.changed = threading.Condition(threading.RLock())
        self.state = State()
        self._weights = folder / "weights"
        self._weights.mkdir(parents=True, exist_ok=True)
        self._lock = (folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise StoreInUse(f"another server has {folder}") from None
        self._journal = RequestJournal(folder / "journal", failed)
        for at, content in self._journal.frames():
            try:
                self.state.apply(decoded(content), at)
            except msgspec.DecodeError as error:
                self._journal.close()
                raise StoreUnreadable(f"{folder / 'journal'}, byte {at}: {error}") from error
        for work in self.state.works.values():
            work.lasting.set_result(None)
            if work.result is not None:
                work.promise.set_result(work.result)
                work.entry.body = b""
        self._least = max(LEAST, GROWTH * self._journal.size)
        for unused in self.unused_weights():
            self.remove_weights(unused.name)

    # folders of weights

    def weights(self, name: str) -> Path:
        return self._weights / name

    def unused_weights(self) -> list[Path]:
        """Folders that nothing refers to, and after a crash nothing will. None may be in the making."""
        self.settle()
        with self.changed:
            used = self.state.folders()
        return [path for path in self._weights.iterdir() if path.name not in used]

    def remove_weights(self, name: str) -> None:
        shutil.rmtree(self.weights(name), ignore_errors=True)

    # changes

    def change(self, *changes: Change, then: Then | None = None) -> None:
        """Change what exists. then: called once that lasts."""
        with self.changed:
            entry = ChangedEntry(list(changes))
            at = self._journal.append(encoded(entry), then)
            self.state.apply(entry, at)
            self.changed.notify_all()

    def accept(self, entry: Accepted, request: object) -> QueuedWork:
        """Take a request that is to be done."""
        with self.changed:
            work = QueuedWork(entry, 0, request, size=len(entry.body))
            work.at = self._journal.append(encoded(entry), fulfils(work.lasting, None))
            entry.body = b""  # from here on it is read from the journal
            self.state.accept(work)
            self.changed.notify_all()
            return work

    def finish(self, work: QueuedWork, done: Done) -> None:
        """What came of a work. Its promise is fulfilled once that lasts."""
        with self.changed:
            result = Result(done.failed, done.media, done.body, done.time)
            self._journal.append(encoded(done), fulfils(work.promise, result))
            self.state.finish(work, done)
            self._finished(work, done)
            self.changed.notify_all()

    def done(self, model: str, seq: int) -> Accepted:
        """A request that has changed a model since its snapshot, as the journal has it."""
        with self.changed:  # a journal that is rewritten has it elsewhere
            at, _ = self.state.history[model][seq]
            entry = decoded(self._journal.read(at))
        assert isinstance(entry, Accepted)
        return entry

    def settle(self) -> None:
        """Wait until all changes last."""
        self._journal.settle()

    # the size of the journal

    def rewrite_if_large(self) -> None:
        with self.changed:
            if self._journal.size > self._least:
                try:
                    self.rewrite()
                except OSError as error:  # it goes on as it is, and is tried again when it is larger
                    LOG.warning("the journal cannot be rewritten: %s", error.strerror)
                self._least = max(LEAST, GROWTH * self._journal.size)

    def rewrite(self) -> None:
        """Leave out of the journal what is not needed any more."""
        with self.changed:
            self._journal.settle()
            entries: list[Accepted | None] = []
            positions = self._journal.rewrite(self._contents(entries))
            moved = {entry.id: at for entry, at in zip(entries, positions, strict=True) if entry is not None}
            for work in self.state.works.values():
                work.at = moved[work.id]
            for entry, at in zip(entries, positions, strict=True):
                history = self.state.history.get(entry.queue, {}) if entry is not None else {}
                if entry is not None and entry.seq in history:
                    history[entry.seq] = (at, history[entry.seq][1])

    def _contents(self, entries: list[Accepted | None]) -> Iterator[bytes]:
        """Frames of the rewritten journal; into `entries` goes for each the request that it has, if it has one."""
        state = self.state
        entries.append(None)
        yield encoded(state.entities())
        repeated = {at for history in state.history.values() for at, _ in history.values()}
        kept: set[str] = set()
        for at, content in self._journal.frames():
            entry = decoded(content)
            if isinstance(entry, Accepted):
                work = state.works.get(entry.id)
                if work is None and at not in repeated:
                    continue
                kept.add(entry.id)
                if at not in repeated and (work is None or work.result is not None):
                    entry.body = b""
                entries.append(entry)
                yield encoded(entry)
            elif isinstance(entry, Done) and entry.id in kept:
                entry.changes = []
                if entry.id not in state.works:
                    entry.body, entry.kept = b"", False
                entries.append(None)
                yield encoded(entry)

    def close(self) -> None:
        self._journal.close()
        self._lock.close()
