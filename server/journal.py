"""The file that a server is restored from: everything that was accepted and everything that was done, in order.

A frame is four bytes of length, four of CRC-32 (both little-endian) and the content. Frames are appended by any thread
and made lasting by one thread of its own, many with one fsync; what depends on a frame is called once it lasts. At the
end of the file a frame may be cut off or damaged, as a power failure leaves it: it and what follows it were never
confirmed, and are dropped when the file is opened.
"""

import logging
import os
import shutil
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from attrs import define

LOG = logging.getLogger(__name__)

_HEAD: Final = struct.Struct("<II")
_PATTERN: Final = "journal-*.bin"

PIECE: Final = 2**20  # bytes that are copied at a time

# Called once a frame lasts: True; or will never: False.
Then = Callable[[bool], None]


class JournalFailed(Exception):
    """The disk has not taken a frame. Nothing can be promised any more, so the server stops."""


class RequestJournal:
    """One file of a folder at a time: a rewritten one has the next number, and replaces the one before.

    failed: called once, in the journal's thread, when the disk refuses; everything after that raises JournalFailed.
    """

    def __init__(self, folder: Path, failed: Callable[[OSError], None] = lambda error: None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._failed = folder, failed
        self._changed = threading.Condition()
        self._written: list[tuple[bytes, Then | None]] = []
        self._appended = self._lasting = 0  # frames, counted since the folder was opened
        self._closing = self._broken = False
        self._number = self._open()
        self._path = self._path_of(self._number)
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        _sync_folder(folder)
        self.size = self._on_disk = self._drop_unconfirmed()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def _path_of(self, number: int) -> Path:
        return self._folder / f"journal-{number:06d}.bin"

    def _open(self) -> int:
        """The number of the newest whole file. A newer one that a crash left half written has another ending."""
        for partial in self._folder.glob("*.partial"):
            partial.unlink()
        numbers = sorted(int(path.stem.partition("-")[2]) for path in self._folder.glob(_PATTERN))
        for old in numbers[:-1]:
            self._path_of(old).unlink()
        return numbers[-1] if numbers else 1

    def _drop_unconfirmed(self) -> int:
        end = 0
        for at, content in self.frames():
            end = at + _HEAD.size + len(content)
        if self._goes_on_behind(end):
            copy = self._path.with_suffix(".damaged")
            shutil.copyfile(self._path, copy)
            LOG.error(
                "%s is damaged at byte %d: what follows is dropped, and %s has it as it was", self._path, end, copy
            )
        os.ftruncate(self._fd, end)
        os.lseek(self._fd, end, os.SEEK_SET)
        os.fsync(self._fd)
        return end

    def _goes_on_behind(self, at: int) -> bool:
        """Whether a frame that is not whole has a whole one behind it. A server that was killed leaves none."""
        head = os.pread(self._fd, _HEAD.size, at)
        return len(head) == _HEAD.size and any(True for _ in self.frames(begin=at + _HEAD.size + _HEAD.unpack(head)[0]))

    # reading

    def frames(self, end: int | None = None, begin: int = 0) -> Iterator[tuple[int, bytes]]:
        """Position and content of every frame between two positions, up to the first that is not whole."""
        at = begin
        with self._path.open("rb") as file:
            file.seek(begin)
            while (end is None or at < end) and len(head := file.read(_HEAD.size)) == _HEAD.size:
                length, checksum = _HEAD.unpack(head)
                content = file.read(length) if length <= _left(file) else b""
                # Zeros, as a file system may leave them behind what was written, would be a frame of nothing.
                if not content or len(content) != length or zlib.crc32(content) != checksum:
                    return
                yield at, content
                at += _HEAD.size + length

    def read(self, at: int) -> bytes:
        """The frame at a position, once it lasts. Raises JournalFailed."""
        with self._changed:
            self._changed.wait_for(lambda: self._broken or at < self._on_disk)
            if at >= self._on_disk:
                raise JournalFailed("the disk has refused a frame")
        length, checksum = _HEAD.unpack(os.pread(self._fd, _HEAD.size, at))
        content = os.pread(self._fd, length, at + _HEAD.size)
        if zlib.crc32(content) != checksum:
            raise JournalFailed(f"{self._path} is damaged at byte {at}")
        return content

    # writing

    def append(self, content: bytes, then: Then | None = None) -> int:
        """Add a frame, and give its position. then: called in the journal's thread; must not raise, nor wait."""
        with self._changed:
            if self._broken or self._closing:
                raise JournalFailed("the journal takes nothing more")
            at = self.size
            self._written.append((_frame(content), then))
            self.size += _HEAD.size + len(content)
            self._appended += 1
            self._changed.notify_all()
            return at

    def settle(self) -> None:
        """Wait until everything that was appended before lasts. Raises JournalFailed."""
        with self._changed:
            last = self._appended
            self._changed.wait_for(lambda: self._broken or self._lasting >= last)
            if self._lasting < last:
                raise JournalFailed("the disk has refused a frame")

    # another file in its place

    @contextmanager
    def successor(self) -> Iterator["NextJournal"]:
        """A file that may replace this one by `follow`; otherwise it is removed. Raises OSError."""
        path = self._path_of(self._number + 1)
        partial = path.with_suffix(".partial")
        fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            yield NextJournal(partial, fd, self._path)
        finally:
            if partial.exists():
                os.close(fd)
                partial.unlink()

    def follow(self, new: "NextJournal") -> None:
        """Go on in another file. All that was appended must last, and nothing may be appended meanwhile; a crash leaves
        the old or the new file. Raises OSError: all is as it was then."""
        path = self._path_of(self._number + 1)
        new.sync()
        new.path.rename(path)
        try:
            _sync_folder(self._folder)
        except OSError:
            path.rename(new.path)
            raise
        os.close(self._fd)
        self._path.unlink()
        self._fd, self._path, self._number = new.fd, path, self._number + 1
        self.size = self._on_disk = new.size

    def close(self) -> None:
        """Make everything last, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        os.close(self._fd)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._written or self._closing)
                if not self._written:
                    return
            if not self._write_all():
                return

    def _write_all(self) -> bool:
        """Make what was appended last; False where the disk refuses."""
        with self._changed:
            batch, self._written = self._written, []
        content = b"".join(frame for frame, _ in batch)
        try:
            _write(self._fd, content)
            os.fsync(self._fd)
        except OSError as error:
            self._failed(error)  # before anyone is answered: health is asked next
            with self._changed:
                self._broken = True
                batch, self._written = batch + self._written, []
                self._changed.notify_all()
            _call(batch, False)
            return False
        _call(batch, True)
        with self._changed:
            self._lasting += len(batch)
            self._on_disk += len(content)
            self._changed.notify_all()
        return True


@define(eq=False)
class NextJournal:
    """A file that is to replace the one of a journal. fd: at its end. of: the file that it replaces."""

    path: Path
    fd: int
    of: Path
    size: int = 0

    def append(self, content: bytes) -> int:
        """Add a frame, and give its position."""
        at, frame = self.size, _frame(content)
        _write(self.fd, frame)
        self.size += len(frame)
        return at

    def copy(self, begin: int) -> int:
        """Add what the other file has from a position on, which must last, and give where that ends."""
        with self.of.open("rb") as file:
            end = os.fstat(file.fileno()).st_size
            file.seek(begin)
            for _ in range(begin, end, PIECE):
                piece = file.read(min(PIECE, end - file.tell()))
                _write(self.fd, piece)
                self.size += len(piece)
        self.sync()
        return end

    def sync(self) -> None:
        """Make all of it last."""
        os.fsync(self.fd)


def _call(batch: list[tuple[bytes, Then | None]], lasting: bool) -> None:
    for _, then in batch:
        if then is not None:
            then(lasting)


def _frame(content: bytes) -> bytes:
    return _HEAD.pack(len(content), zlib.crc32(content)) + content


def _write(fd: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]


def _left(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size - file.tell()


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
