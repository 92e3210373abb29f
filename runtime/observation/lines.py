"""Files of one JSON object a line: `JsonLines` writes them, `Pen` does so in a thread, `records_since` reads them."""

import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

from attrs import define, field

from ..errors import EnvironmentFault
from .outlet import ROOM, Outlet

# Seconds that an event is waited for, to be in its file: a disk that takes longer does not answer.
EVENT_SECONDS: Final = 2.0
_BLOCK: Final = 1 << 20


def in_json(record: dict[str, Any]) -> dict[str, Any]:
    """A record with texts for numbers that JSON has no word for: a reader that is not Python would refuse the line."""
    return {key: _plain(value) for key, value in record.items()}


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _line_of(record: dict[str, Any]) -> bytes:
    line = json.dumps(in_json(record), separators=(",", ":"), ensure_ascii=False)
    return (line + "\n").encode(errors="backslashreplace")  # names of files may be no text


@define(eq=False)
class JsonLines:
    """Appends records to a file. A line reaches the file as a whole, so a reader never sees half of one for long.

    Half a line that a killed process or a full disk has left is ended by the next writer, whose own lines stay whole.
    """

    path: Path
    _fd: int | None = field(default=None, init=False)

    def write(self, record: dict[str, Any]) -> None:
        """Raises EnvironmentFault where the disk does not take it."""
        try:
            if self._fd is None:
                self._fd = self._opened()
            content = _line_of(record)
            while content:
                content = content[os.write(self._fd, content) :]
        except OSError as error:
            with suppress(OSError):
                self.close()  # half a line may stand there
            raise EnvironmentFault("X706", f"{self.path} cannot be written: {error.strerror}") from error

    def _opened(self) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            os.write(fd, b"\n")
        return fd

    def close(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)


@define(eq=False)
class _Line:
    """A record on its way to a file. awaited: somebody wants to know what became of it."""

    lines: JsonLines
    record: dict[str, Any]
    awaited: bool
    error: Exception | None = None


class Pen:
    """Writes the records of several files in the order in which they come, in a thread of its own.

    Nobody waits for a disk but those who ask to. hangs: what was waited for was not written in time, and nothing has
    been since: until it is, nobody waits again.
    """

    def __init__(self, *, room: int = ROOM) -> None:
        self.hangs = False
        self._outlet = Outlet("writing records", self._carry, room=room)
        self._fault: Exception | None = None

    def write(self, lines: JsonLines, record: dict[str, Any], size: int) -> bool:
        """Whether there was room to wait in. size: how many values it has. Raises what `raise_fault` does."""
        self.raise_fault()
        return self._outlet.put(_Line(lines, record, awaited=False), size)

    def write_now(self, lines: JsonLines, record: dict[str, Any], seconds: float = EVENT_SECONDS) -> None:
        """Write behind all that came before, and return when that is done or so many seconds have passed.

        Raises EnvironmentFault where the disk does not take it. There is always room for it.
        """
        line = _Line(lines, record, awaited=seconds > 0 and not self.hangs)
        if not line.awaited:
            self._outlet.send(line)
            return
        line.awaited = self._outlet.deliver(line, seconds)
        self.hangs = not line.awaited
        if line.error is not None:
            raise line.error

    def settle(self, seconds: float | None) -> bool:
        """Whether all is in its file, within so many seconds. Raises what has gone wrong."""
        settled = self._outlet.deliver(None, seconds)
        self.raise_fault()
        return settled

    def close(self, seconds: float) -> bool:
        """Whether all was written that can be, within so many seconds; the thread has ended then."""
        return self._outlet.close(seconds)

    def raise_fault(self) -> None:
        """Raise what has gone wrong with the first record that nobody waited for and that could not be written."""
        if self._fault is not None:
            raise self._fault

    def _carry(self, line: _Line) -> None:
        try:
            line.lines.write(line.record)
        except Exception as error:  # told where somebody can hear it
            line.error = error
            if not line.awaited and self._fault is None:
                self._fault = error
        self.hangs = False


class Sizes:
    """How many values records of steps have: as many as another one with as many keys, which is a cheap question."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}

    def of(self, record: dict[str, Any]) -> int:
        size = self._known.get(len(record))
        if size is None:
            size = self._known[len(record)] = size_of_record(record)
        return size


@define(eq=False)
class QueuedLines:
    """A file of records that nobody waits for. lost: how many found no room, because the disk did not keep up."""

    lines: JsonLines
    pen: Pen
    lost: int = 0
    _sizes: Sizes = field(factory=Sizes)

    def write(self, record: dict[str, Any]) -> bool:
        """Whether it is on its way to the file; a record says how many before it are not (`dropped`), if any.

        Raises EnvironmentFault where the disk did not take an earlier one.
        """
        size = self._sizes.of(record)
        written = self.pen.write(self.lines, {**record, "dropped": self.lost} if self.lost else record, size)
        self.lost += not written
        return written


def size_of_record(record: dict[str, Any]) -> int:
    """How many values are in a record."""
    return len(record) + sum(len(value) for value in record.values() if isinstance(value, list | dict))


def records_since(path: Path, offset: int) -> list[dict[str, Any]]:
    """The records of a file from a byte on; lines that are torn, as on a disk that was full, are left out."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(offset)
        lines = file.read().splitlines()
    found = []
    for line in lines:
        with suppress(ValueError):
            found.append(json.loads(line))
    return [record for record in found if isinstance(record, dict)]


def last_record(path: Path) -> dict[str, Any] | None:
    """The last record of a file; None where there is none that is whole."""
    with suppress(OSError, ValueError), path.open("rb") as file:
        record = json.loads(_last_line(file)[1])
        return record if isinstance(record, dict) else None
    return None


def add_to_last(path: Path, step: int, fields: dict[str, Any]) -> bool:
    """Add fields to the last record of a file if it is that of a step. The file is replaced by another one, as a reader
    must not see half of it.

    `step` and `time` of the record stay. Whether there was such a record. Raises OSError.
    """
    rest = path.with_suffix(".tmp")
    with path.open("rb") as file:
        begin, line = _last_line(file)
        try:
            record = json.loads(line)
            if record["step"] != step:
                return False
            kept = {"step": step, "time": record["time"]}
        except (ValueError, KeyError, TypeError):
            return False
        file.seek(0)
        with rest.open("wb") as new:
            left = begin
            while left and (block := file.read(min(left, _BLOCK))):
                new.write(block)
                left -= len(block)
            new.write(_line_of({**record, **fields, **kept}))
    rest.replace(path)
    return True


def _last_line(file: BinaryIO) -> tuple[int, bytes]:
    """Where it begins, and what it is, without its end."""
    end = file.seek(0, os.SEEK_END)
    begin, tail = end, b""
    while begin and b"\n" not in tail[:-1]:
        begin = max(0, begin - _BLOCK)
        file.seek(begin)
        tail = file.read(end - begin)
    line = tail.rstrip(b"\n").rpartition(b"\n")[2]
    return begin + len(tail.rstrip(b"\n")) - len(line), line


def size_of(path: Path) -> int:
    """Bytes of a file; 0 if there is none."""
    return path.stat().st_size if path.exists() else 0


def trim_after(path: Path, step: int, superseded: Path) -> int:
    """Drop the records of steps after `step` from a metrics file: they are about to be computed again.

    What is dropped is kept in `superseded`. Returns how many records that were.
    """
    if not path.exists():
        return 0
    keep: list[bytes] = []
    drop: list[bytes] = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            late = json.loads(line)["step"] > step
        except (ValueError, KeyError, TypeError):
            late = True  # the torn last line of a killed run
        (drop if late else keep).append(line)
    if drop:
        superseded.parent.mkdir(parents=True, exist_ok=True)
        with superseded.open("ab") as out:
            out.writelines(drop)
        rest = path.with_suffix(".tmp")
        rest.write_bytes(b"".join(keep))
        rest.replace(path)
    return len(drop)
