"""State of a server, in memory and in its database; every change writes rows, in the order of the changes.

DIR/store.db        rows (`database.py`): things that exist, requests, results
DIR/weights/ID      what an engine has saved or exported
DIR/aside/TIME      weights that nothing referred to when the server was started at that time; kept for a week
DIR/damaged/TIME    what was there when the store was repaired at that time; kept for ever
"""

import calendar
import fcntl
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from errno import EIO
from pathlib import Path
from typing import Final

from xtrain.dsl.diagnostics.diagnostic import printable
from xtrain.server import database
from xtrain.server import loading as old_journal
from xtrain.server.database import FILE, MARK, WAL, Database, StoreFailed, Then, examine, mend_head
from xtrain.server.loading import check_weights, load, sealed
from xtrain.server.state import (
    Accepted,
    Change,
    Done,
    FolderEntry,
    QueuedWork,
    Removed,
    State,
    decoded,
    encoded,
    folder_of,
    key_of,
)

ASIDE: Final = 7 * 86400.0  # seconds for which unreferenced weights are kept
STAMP: Final = "%Y%m%dT%H%M%SZ"
SHOWN: Final = 20  # places of damage in a message


def fulfils(promise: "Future[None]", after: Callable[[], None] = lambda: None) -> Then:
    """Return a callback that fulfills a promise once rows are durable; if they never are, the promise fails with
    StoreFailed."""

    def then(lasting: bool) -> None:
        if lasting:
            promise.set_result(None)
            after()
        else:
            promise.set_exception(StoreFailed("the disk has refused rows"))

    return then


class StoreInUse(Exception):
    """Another server uses the folder."""


class StoreDamaged(Exception):
    """The store differs from what was written; all files are left unchanged. damage: the places."""

    def __init__(self, folder: Path, damage: list[str]) -> None:
        self.damage = [printable(place) for place in damage]  # keys of rows are arbitrary
        more = f"\n  and {len(damage) - SHOWN} more" if len(damage) > SHOWN else ""
        super().__init__(f"{folder} is damaged:\n  " + "\n  ".join(self.damage[:SHOWN]) + more)


class Store:
    """A server's state and the folders of its weights. Its lock guards all of it; `changed` notifies waiting threads.
    finished: called for every finished request.

    Raises StoreInUse, StoreDamaged and OSError.
    """

    def __init__(
        self,
        folder: Path,
        clock: Callable[[], float] = time.time,
        failed: Callable[[str], None] = lambda reason: None,
        finished: Callable[[QueuedWork, Done], None] = lambda work, done: None,
    ) -> None:
        self.folder, self.clock, self._finished = folder, clock, finished
        self.changed = threading.Condition(threading.RLock())
        self._weights = folder / "weights"
        self._weights.mkdir(parents=True, exist_ok=True)
        self._left: set[str] = set()  # folders whose references were removed
        with ExitStack() as held:
            held.enter_context(holding(folder))
            self.state = _opened(folder)
            self._database = Database(folder, failed)
            self._held = held.pop_all()
        self._database.write({f"FolderEntry/{name}": None for name in self._set_aside("aside")})

    # folders of weights

    def weights(self, name: str) -> Path:
        return self._weights / name

    def seal(self, name: str) -> FolderEntry:
        """Register a written folder, which is then referenced."""
        entry = sealed(self.weights(name))
        self.change(entry)
        return entry

    def remove_unused(self, forget: Callable[[Path], None]) -> None:
        """Remove folders that a client removed or a newer one replaced, once that is stored, and folders set aside a
        week ago. forget: called before each removal. No folder may be in creation."""
        self.settle()
        with self.changed:
            gone = self._left - self.state.used_folders()
            self._left.clear()
            if gone:
                self.change(*(Removed("FolderEntry", name) for name in gone))
        for name in gone:
            forget(self.weights(name))
            shutil.rmtree(self.weights(name), ignore_errors=True)
        for old in (self.folder / "aside").glob("*Z"):
            with suppress(ValueError):
                if self.clock() - _seconds(old.name) > ASIDE:
                    shutil.rmtree(old, ignore_errors=True)

    def _set_aside(self, to: str) -> list[str]:
        """Move unreferenced folders of weights, and return the names of folders in rows."""
        used = self.state.used_folders()
        _move((path for path in self._weights.iterdir() if path.name not in used), self.folder / to, self.clock())
        gone = self.state.folders.keys() - used
        for name in gone:
            del self.state.folders[name]
        return list(gone)

    # changes

    def change(self, *changes: Change, then: Then | None = None) -> None:
        """Change entries. then: called once the change is durable."""
        with self.changed:
            self._database.write(self._changed(changes), then)
            self.changed.notify_all()

    def _changed(self, changes: Iterable[Change]) -> dict[str, bytes | None]:
        """Apply changes to the state; return the changed rows."""
        rows: dict[str, bytes | None] = {}
        for change in changes:
            before, history = self.state.table(change).get(change.id), self.state.history.get(change.id, {})
            if (folder := folder_of(before)) is not None:
                self._left.add(folder)
            self.state.change(change)
            for seq in history.keys() - self.state.history.get(change.id, {}).keys():
                id = history[seq][0]
                work = self.state.works.get(id)
                rows[f"Accepted/{id}"] = None if work is None else encoded(work.entry)
            rows[key_of(change)] = None if isinstance(change, Removed) else self.state.row_of(change)
        return rows

    def accept(self, entry: Accepted, request: object) -> QueuedWork:
        """Accept a request."""
        with self.changed:
            work = QueuedWork(entry, request, size=len(entry.body))
            self._database.write({key_of(entry): encoded(entry)}, fulfils(work.lasting, work.is_lasting))
            entry.body = b""  # read from the database from here on
            self.state.accept(work)
            self.changed.notify_all()
            return work

    def finish(self, work: QueuedWork, done: Done) -> None:
        """Store the result of a request. Its promise is fulfilled once the result is durable."""
        with self.changed:
            rows = self._changed(done.changes)
            self.state.finish(work, done)
            done.changes = []
            rows[key_of(done)] = encoded(done)
            if not self.state.repeats(work.entry):
                rows[key_of(work.entry)] = encoded(work.entry)  # without its body
            if (model := self.state.models.get(work.entry.queue)) is not None:
                rows[key_of(model)] = self.state.row_of(model)
            self._database.write(rows, fulfils(work.promise, work.is_done))
            self._finished(work, done)
            work.measured = None
            self.changed.notify_all()

    def drop(self, works: Iterable[QueuedWork]) -> None:
        """Forget requests whose results are no longer kept."""
        with self.changed:
            rows: dict[str, bytes | None] = {}
            for work in works:
                self.state.drop(work)
                rows[f"Done/{work.id}"] = None
                if not self.state.repeats(work.entry):
                    rows[key_of(work.entry)] = None
            if rows:
                self._database.write(rows)

    def result(self, work: QueuedWork) -> Done | None:
        """Return the result of a finished request; None if it is no longer kept. Raises StoreFailed."""
        content = self._database.read(f"Done/{work.id}")
        entry = None if content is None else decoded(content)
        assert entry is None or isinstance(entry, Done)
        return entry

    def done(self, model: str, seq: int) -> Accepted:
        """Return a request that has changed a model since its snapshot. Raises StoreFailed."""
        self.settle()
        content = self._database.read(f"Accepted/{self.state.history[model][seq][0]}")
        entry = None if content is None else decoded(content)
        if not isinstance(entry, Accepted):
            raise StoreFailed(f"request {seq} of {model} is missing")
        return entry

    def settle(self) -> None:
        """Wait until all changes are durable. Raises StoreFailed."""
        self._database.settle()

    def close(self) -> None:
        self._database.close()
        self._held.close()


@contextmanager
def holding(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder. Raises StoreInUse if another server holds it, and OSError for database errors."""
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StoreInUse(f"another server has {folder}") from None
        try:
            yield
        except sqlite3.Error as error:
            raise OSError(EIO, str(error), str(folder / FILE)) from error


def _opened(folder: Path) -> State:
    """Return the state in an intact folder; the journal of an older version is converted to a database."""
    damage, state = list[str](), State()
    old = folder / old_journal.FOLDER
    if not (folder / FILE).exists():
        if old.exists():
            rows = old_journal.converted(folder, damage)
            if not damage:
                database.create(folder, rows)
        elif not any((folder / name).exists() for name in (WAL, MARK)) and not any((folder / "weights").iterdir()):
            return state
    if not damage:
        if old.exists():
            old.rename(folder / old_journal.CONVERTED)
        state = load(examine(folder, damage), damage)
        check_weights(state, folder / "weights", damage)
    if damage:
        raise StoreDamaged(folder, damage)
    return state


def repair(folder: Path) -> list[str]:
    """Repair a damaged store with all intact data; return the places of damage, none if it was intact. The previous
    files are moved to a folder in `damaged`. Raises StoreInUse and OSError."""
    (folder / "weights").mkdir(parents=True, exist_ok=True)
    with holding(folder):
        try:
            _opened(folder)
        except StoreDamaged as error:
            before = error.damage
        else:
            return []
        now, damage, kept = time.time(), list[str](), dict[str, bytes]()
        to = folder / "damaged" / _stamp(now)
        (to / "reading").mkdir(parents=True)
        for name in (FILE, WAL, MARK):
            if (folder / name).exists():
                shutil.copy2(folder / name, to)
                shutil.copy2(folder / name, to / "reading")
        if (folder / FILE).exists():
            mend_head(to / "reading")
            state = load(examine(to / "reading", damage), damage, kept)
        elif (folder / old_journal.FOLDER).exists():
            state = load(old_journal.converted(folder, damage).items(), damage, kept)
        else:
            state = State()
        for name in state.used_folders() - state.folders.keys():
            if (folder / "weights" / name).is_dir():  # unchanged, because their original content is unknown
                state.change(sealed(folder / "weights" / name))
        check_weights(state, folder / "weights", damage)
        used = state.used_folders()
        tables = (state.sessions, state.models, state.checkpoints, state.samplers, state.folders)
        things = [one for table in tables for one in table.values()]
        rows = {key_of(one): state.row_of(one) for one in things if not isinstance(one, FolderEntry) or one.id in used}
        needed = {f"Done/{id}" for id in state.works} | {f"Accepted/{id}" for id in state.works}
        needed |= {f"Accepted/{id}" for history in state.history.values() for id, _ in history.values()}
        database.create(folder, rows | {key: content for key, content in kept.items() if key in needed})
        _move((path for path in (folder / "weights").iterdir() if path.name not in used), folder / "damaged", now)
        if (folder / old_journal.FOLDER).exists():
            (folder / old_journal.FOLDER).rename(to / old_journal.FOLDER)
        shutil.rmtree(to / "reading")
        return list(dict.fromkeys([*before, *map(printable, damage)]))


def _move(paths: Iterable[Path], to: Path, now: float) -> None:
    """Move folders to a folder named by the present time."""
    for path in list(paths):
        (to / _stamp(now) / "weights").mkdir(parents=True, exist_ok=True)
        path.rename(to / _stamp(now) / "weights" / path.name)


def _stamp(seconds: float) -> str:
    return time.strftime(STAMP, time.gmtime(seconds))


def _seconds(stamp: str) -> float:
    return float(calendar.timegm(time.strptime(stamp, STAMP)))
