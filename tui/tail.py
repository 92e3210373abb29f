"""Reads a growing file of JSON lines, a bit at a time."""

import os
from pathlib import Path
from typing import Any

from xtrain.records.lines import objects
from xtrain.regular_files import open_regular

# Most bytes parsed in one read: catching up with a long run stays bounded in memory.
CHUNK_BYTES = 4 << 20
LONGEST_LINE = 64 << 20  # bytes


class Tail:
    """Reader of the JSON objects in complete lines appended to `path` since the last read, beginning at byte `offset`.

    The offset only moves past whole lines, so a partial line (or partial character) is read again once the rest has
    been written. A file that shrank or was replaced is another file, read from its start.
    """

    def __init__(self, path: Path, offset: int = 0, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.path = path
        self.offset = offset
        self.chunk_bytes = chunk_bytes
        self.damaged = 0
        """Complete lines without a JSON object."""
        self.behind = False
        """True if the last read stopped at `chunk_bytes` with more already written."""
        self.begun_anew = 0
        """Number of times the file was replaced by another one."""
        self._inode: tuple[int, int] | None = None

    def read(self) -> list[dict[str, Any]]:
        """Return new objects in file order; empty if there are none or the file cannot be read now."""
        try:
            block = self._read_lines()
        except OSError:
            # Not there yet, gone with its directory, or a file system that hiccups: the next read decides.
            self.behind = False
            return []
        found, damaged = objects(block)
        self.damaged += damaged
        return found

    def _read_lines(self) -> bytes:
        """Return whole lines after the offset, at most `chunk_bytes` unless one line alone is longer."""
        with open_regular(self.path) as file:
            status = os.fstat(file.fileno())
            inode = (status.st_dev, status.st_ino)
            if status.st_size < self.offset or self._inode not in (None, inode):
                self.offset = 0
                self.begun_anew += 1
            self._inode = inode
            file.seek(self.offset)
            data = file.read(self.chunk_bytes)
            end = data.rfind(b"\n") + 1
            while not end and len(data) < LONGEST_LINE and (more := file.read(self.chunk_bytes)):
                end = len(data) + more.rfind(b"\n") + 1 if b"\n" in more else 0
                data += more
            if not end and len(data) >= LONGEST_LINE:  # no record, nor what follows, which may be without end
                self.offset, self.behind = status.st_size, False
                self.damaged += 1
                return b""
            self.behind = file.tell() < status.st_size
        self.offset += end
        return data[:end]
