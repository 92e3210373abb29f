"""Rows of a server in an SQLite file: each has a key and a checksum, and one thread commits them in batches.

`confirmed`, next to the file, has the number of the last commit that was reported to anybody. It is written after each
commit without fsync, so it is never ahead: if the file has fewer commits, it or its -wal has lost some.
"""

import logging
import os
import sqlite3
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

LOG = logging.getLogger(__name__)

FILE: Final = "store.db"
WAL: Final = f"{FILE}-wal"
MARK: Final = "confirmed"
COMMITS: Final = "commits"  # key of the row with the number of commits
VERSION: Final = 1
PAGE: Final = 4096
LOCKED: Final = 60.0  # seconds to wait for another process that reads the file
WAL_KEPT: Final = 64 * 2**20  # bytes of the -wal kept after a checkpoint

_SCHEMA: Final = (
    "CREATE TABLE rows (number INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, content BLOB NOT NULL, "
    "checksum INTEGER NOT NULL)"
)
_PUT: Final = (
    "INSERT INTO rows (key, content, checksum) VALUES (?, ?, ?) "
    "ON CONFLICT (key) DO UPDATE SET content = excluded.content, checksum = excluded.checksum"
)
_ROWS: Final = "SELECT number, key, content, checksum FROM rows"
_INDEX: Final = "SELECT number, key FROM rows INDEXED BY sqlite_autoindex_rows_1"

Rows = Mapping[str, bytes | None]
"""Content by key; None removes the row."""
Then = Callable[[bool], None]
"""Called with True once rows are durable, or with False if they never will be."""


class StoreFailed(Exception):
    """The disk rejected or altered rows. Nothing can be promised anymore, so the server stops."""


class Database:
    """The database file of a folder. It must be intact (`examine`) or is created. failed: called once with the reason
    when the disk fails; later calls raise StoreFailed. Raises OSError."""

    def __init__(self, folder: Path, failed: Callable[[str], None] = lambda reason: None) -> None:
        self._path, self._failed = folder / FILE, failed
        if not self._path.exists():
            create(folder, {})
        self._changed, self._reading = threading.Condition(), threading.Lock()
        self._written: list[tuple[Rows, Then | None]] = []
        self._appended = self._lasting = 0
        self._closing = self._broken = False
        self._writer, self._reader = _connect(self._path), _connect(self._path)
        self._mark = os.open(folder / MARK, os.O_RDWR | os.O_CREAT, 0o600)
        self._commits = int(self._row(COMMITS) or b"0")
        self._thread = threading.Thread(target=self._run, name="database", daemon=True)
        self._thread.start()

    def write(self, rows: Rows, then: Then | None = None) -> None:
        """Put and remove rows. then: called in the database's thread; must not raise, nor wait."""
        with self._changed:
            if self._broken or self._closing:
                raise StoreFailed("the store is closed")
            self._written.append((rows, then))
            self._appended += 1
            self._changed.notify_all()

    def settle(self) -> None:
        """Wait until all earlier writes are durable. Raises StoreFailed."""
        with self._changed:
            last = self._appended
            self._changed.wait_for(lambda: self._broken or self._lasting >= last)
            if self._lasting < last:
                raise StoreFailed("the disk has refused rows")

    def read(self, key: str) -> bytes | None:
        """Return the content of a durable row; None if there is none. Raises StoreFailed."""
        try:
            return self._row(key)
        except (sqlite3.Error, StoreFailed) as error:
            self._failed(f"{self._path}: row {key} cannot be read: {error}")
            raise StoreFailed(str(error)) from error

    def _row(self, key: str) -> bytes | None:
        with self._reading:
            found = self._reader.execute("SELECT content, checksum FROM rows WHERE key = ?", (key,)).fetchone()
        if found is not None and _checksum(key.encode(), found[0]) != found[1]:
            raise StoreFailed("its checksum is wrong")
        return None if found is None else found[0]

    def close(self) -> None:
        """Make everything durable, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        for connection in (self._reader, self._writer):
            connection.close()
        os.close(self._mark)

    def _run(self) -> None:
        while self._write_next():
            pass

    def _write_next(self) -> bool:
        """Wait for rows and commit all that are waiting; False if the disk fails or no more rows will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._written or self._closing)
            batch, self._written = self._written, []
        if not batch:
            return False
        try:
            self._commit([rows for rows, _ in batch])
        except (sqlite3.Error, OSError) as error:
            # before anyone is answered: clients ask for health next
            self._failed(f"{self._path} cannot be written: {error}")
            with self._changed:
                self._broken = True
                batch, self._written = batch + self._written, []
                self._changed.notify_all()
            _call(batch, False)
            return False
        _call(batch, True)
        with self._changed:
            self._lasting += len(batch)
            self._changed.notify_all()
        return True

    def _commit(self, batch: Iterable[Rows]) -> None:
        """Write rows in one transaction, durable on return."""
        self._writer.execute("BEGIN IMMEDIATE")
        for rows in batch:
            _put(self._writer, rows)
        self._commits += 1
        _put(self._writer, {COMMITS: b"%d" % self._commits})
        self._writer.execute("COMMIT")
        os.pwrite(self._mark, _mark_of(self._commits), 0)


def create(folder: Path, rows: Rows) -> None:
    """Write the file of a store, replacing an existing one; durable on return. Raises OSError."""
    partial = folder / f"{FILE}.partial"
    for name in (partial.name, f"{partial.name}-wal", f"{partial.name}-shm"):
        (folder / name).unlink(missing_ok=True)
    os.close(os.open(partial, os.O_CREAT | os.O_EXCL, 0o600))
    connection = _connect(partial)
    connection.execute("BEGIN")
    connection.execute(_SCHEMA)
    connection.execute(f"PRAGMA user_version = {VERSION}")
    _put(connection, rows)
    _put(connection, {COMMITS: b"0"})
    connection.execute("COMMIT")
    connection.close()
    _sync(partial)
    for name in (MARK, WAL, f"{FILE}-shm"):  # of the replaced file; without a mark, no other file counts as intact
        (folder / name).unlink(missing_ok=True)
    partial.rename(folder / FILE)
    (folder / MARK).write_bytes(_mark_of(0))
    _sync(folder / MARK)
    _sync(folder)


def examine(folder: Path, damage: list[str]) -> Iterator[tuple[str, bytes]]:
    """Yield key and content of every intact row, in order, and add the place of each damage. Files are not changed."""
    if not (folder / FILE).exists():
        damage.append(f"{FILE} is missing")
        return
    (folder / FILE).open("rb").close()  # a file that cannot be read is an error, not damage
    had_wal = (folder / WAL).exists()
    connection, commits = sqlite3.connect(f"{(folder / FILE).absolute().as_uri()}?mode=ro", uri=True), None
    connection.text_factory = bytes
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version != VERSION:
            damage.append(f"{FILE} has version {version} in its head, not {VERSION}")
        found = [str(row[0], "utf-8", "replace") for row in connection.execute("PRAGMA integrity_check(20)")]
        damage += [f"{FILE}: {' '.join(each.replace('***', '').split())}" for each in found if each != "ok"]
    except sqlite3.Error as error:
        damage.append(f"{FILE}: {error}")
    for number, key, content, checksum in _scan(connection, damage):
        if not isinstance(key, bytes) or not isinstance(content, bytes) or _checksum(key, content) != checksum:
            name = str(key, "utf-8", "replace") if isinstance(key, bytes) else "?"
            damage.append(f"{FILE}, row {number} (`{name[:100]}`): its checksum is wrong")
        elif key == COMMITS.encode():
            commits = int(content)
        else:
            yield key.decode(), content
    connection.close()
    if not had_wal:
        (folder / WAL).unlink(missing_ok=True)  # an empty one, for reading
    confirmed = _confirmed(folder / MARK)
    if confirmed is None and commits != 0:
        damage.append(f"{MARK} is missing or damaged")
    if commits is None:
        damage.append(f"{FILE}: the number of commits is lost")
    elif confirmed is not None and commits < confirmed:
        damage.append(f"{FILE} with {WAL} has {commits} commits, and {confirmed} were confirmed: the rest is lost")


def mend_head(folder: Path) -> None:
    """Replace a file's first page, which holds no row data, by the first page of a new file."""
    other = folder / "empty"
    other.mkdir()
    create(other, {})
    page = bytearray((other / FILE).read_bytes()[:PAGE])
    page[28:40] = bytes(12)  # the number of pages, which is then derived from the size, and the list of free pages
    with (folder / FILE).open("r+b") as file:
        file.write(page)


def _scan(connection: sqlite3.Connection, damage: list[str]) -> Iterator[tuple[int, Any, Any, Any]]:
    """Yield all reachable rows: forward; then backward to an unreadable part; then one by one from the index."""
    last, found, missing = 0, dict[int, Any](), dict[int, Any]()
    try:
        for row in connection.execute(f"{_ROWS} ORDER BY number"):
            last = row[0]
            yield row
        return
    except sqlite3.Error as error:
        damage.append(f"{FILE}, behind row {last}: {error}")
    for order in ("", "DESC"):
        with suppress(sqlite3.Error):
            missing.update(connection.execute(f"{_INDEX} ORDER BY key {order}"))
    with suppress(sqlite3.Error):
        for row in connection.execute(f"{_ROWS} WHERE number > ? ORDER BY number DESC", (last,)):
            found[row[0]] = row
    for number in sorted(number for number in missing.keys() - found.keys() if number > last):
        with suppress(sqlite3.Error):
            found[number] = connection.execute(f"{_ROWS} WHERE number = ?", (number,)).fetchone()
        if found.get(number) is None:
            damage.append(f"{FILE}, row {number} (`{str(missing[number], 'utf-8', 'replace')[:100]}`): it is lost")
    yield from (found[number] for number in sorted(found) if found[number] is not None)


def _connect(path: Path) -> sqlite3.Connection:
    """Connect so that every commit is durable when it returns."""
    connection = sqlite3.connect(path, timeout=LOCKED, isolation_level=None, check_same_thread=False)
    kept = f"journal_size_limit = {WAL_KEPT}"
    for pragma in (f"page_size = {PAGE}", "journal_mode = WAL", "synchronous = FULL", kept):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def _put(connection: sqlite3.Connection, rows: Rows) -> None:
    for key, content in rows.items():
        if content is None:
            connection.execute("DELETE FROM rows WHERE key = ?", (key,))
        else:
            connection.execute(_PUT, (key, content, _checksum(key.encode(), content)))


def _checksum(key: bytes, content: bytes) -> int:
    return zlib.crc32(content, zlib.crc32(key))


def _mark_of(commits: int) -> bytes:
    text = b"%020d" % commits
    return b"%s %08x\n" % (text, zlib.crc32(text))


def _confirmed(path: Path) -> int | None:
    """Return the number in a mark; None if there is none."""
    content = path.read_bytes() if path.exists() else b""
    number = content[:20]
    return int(number) if number.isdigit() and content == _mark_of(int(number)) else None


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def _call(batch: list[tuple[Rows, Then | None]], lasting: bool) -> None:
    for _, then in batch:
        if then is not None:
            then(lasting)
