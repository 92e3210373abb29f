"""State and journal as one: nothing changes without an entry, and entries are in the order of the changes."""

import fcntl
import logging
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Final

import msgspec

from .entries import Accepted, Change, ChangedEntry, Done, decoded, encoded
from .journal import JournalFailed, RequestJournal, Then
from .state import LASTS, QueuedWork, State

LOG = logging.getLogger(__name__)

# A journal is rewritten once it has grown to so many times what it was after the last time, and so many bytes.
GROWTH: Final = 4
LEAST: Final = 64 * 2**20

# Bytes of what has come meanwhile, which are copied while nothing can be appended.
REST: Final = 2**20


def fulfils(promise: "Future[None]", after: Callable[[], None] = lambda: None) -> Then:
    """Fulfils a promise once a frame lasts; where it never will whoever waits gets JournalFailed."""

    def then(lasting: bool) -> None:
        if lasting:
            promise.set_result(None)
            after()
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
            work.lasting = LASTS
            if work.result is not None:
                work.promise = LASTS
                work.entry.body = b""
        self._least = max(LEAST, GROWTH * self._journal.size)
        self._closing = False
        self._rewriting = threading.Thread(target=self._rewrite_or_say)
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
            work.at = self._journal.append(encoded(entry), fulfils(work.lasting, work.is_lasting))
            entry.body = b""  # from here on it is read from the journal
            self.state.accept(work)
            self.changed.notify_all()
            return work

    def finish(self, work: QueuedWork, done: Done) -> None:
        """What came of a work. Its promise is fulfilled once that lasts."""
        with self.changed:
            at = self._journal.append(encoded(done), fulfils(work.promise, work.is_done))
            self.state.finish(work, done, at)
            self._finished(work, done)
            work.measured = None
            self.changed.notify_all()

    def result(self, work: QueuedWork) -> Done | None:
        """What came of a work whose promise is fulfilled, as the journal has it; None: it is no longer kept."""
        with self.changed:  # a journal that is rewritten has it elsewhere
            if self.state.works.get(work.id) is not work or work.result is None:
                return None
            entry = decoded(self._journal.read(work.result.at))
        assert isinstance(entry, Done)
        return entry

    def done(self, model: str, seq: int) -> Accepted:
        """A request that has changed a model since its snapshot, as the journal has it."""
        with self.changed:  # as above
            at, _ = self.state.history[model][seq]
            entry = decoded(self._journal.read(at))
        assert isinstance(entry, Accepted)
        return entry

    def settle(self) -> None:
        """Wait until all changes last."""
        self._journal.settle()

    # the size of the journal

    def rewrite_if_large(self) -> None:
        """Begin to, in a thread of its own, unless that is done already."""
        if self._journal.size > self._least and not self._rewriting.is_alive():
            self._rewriting = threading.Thread(target=self._rewrite_or_say, name="rewriting", daemon=True)
            self._rewriting.start()

    def _rewrite_or_say(self) -> None:
        try:
            self.rewrite()
        except OSError as error:  # it goes on as it is, and is tried again when it is larger
            LOG.warning("the journal cannot be rewritten: %s", error.strerror)
        except JournalFailed:  # the server ends
            return
        self._least = max(LEAST, GROWTH * self._journal.size)

    def rewrite(self) -> None:
        """Leave out of the journal what is not needed any more.

        Requests are taken and done meanwhile: what they append is copied as it is, and for the last of it alone they
        wait. Raises OSError and JournalFailed; all is as it was then.
        """
        with self.changed:
            end, entities = self._journal.size, encoded(self.state.entities())
            waiting = {work.at for work in self.state.works.values() if work.result is None}
            done = {work.at for work in self.state.works.values()} - waiting
            repeated = {at for history in self.state.history.values() for at, _ in history.values()}
        self._journal.settle()
        moved: dict[int, int] = {}
        with self._journal.successor() as new:
            new.append(entities)
            kept: dict[str, bool] = {}  # id: whether its result is
            for at, content in self._journal.frames(end):
                if self._closing:
                    return
                entry = decoded(content)
                if isinstance(entry, Accepted) and at in waiting | repeated:
                    kept[entry.id] = at in done | waiting
                    moved[at] = new.append(content)
                elif isinstance(entry, Accepted) and at in done:
                    kept[entry.id], entry.body = True, b""
                    moved[at] = new.append(encoded(entry))
                elif isinstance(entry, Done) and entry.id in kept:
                    entry.changes = []
                    if not kept[entry.id]:
                        entry.body, entry.kept = b"", False
                    moved[at] = new.append(encoded(entry))
            copied = end
            while self._journal.size - copied > REST:
                self._journal.settle()
                copied = new.copy(copied)
            with self.changed:
                self._journal.settle()
                new.copy(copied)
                shift = new.size - self._journal.size
                self._journal.follow(new)
                self.state.moved(lambda at: moved[at] if at < end else at + shift)

    def close(self) -> None:
        self._closing = True
        if self._rewriting.is_alive():
            self._rewriting.join()
        self._journal.close()
        self._lock.close()
