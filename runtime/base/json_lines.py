"""Files with one JSON object per line, written directly or by a background thread.

`BackgroundQueue` is a bounded queue with a thread, so that the training loop never waits for a disk or a network. If
the thread cannot keep up, new items are refused and the caller counts them. Adding an item only appends to a list: the
thread polls instead of being woken.
"""

import errno
import os
import stat
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
from attrs import define, field

from xtrain.records.lines import Record, as_object, json_line, line_of, object_of
from xtrain.records.metrics import RankMetrics, StepMetrics
from xtrain.regular_files import open_regular
from xtrain.runtime.base import files as durable
from xtrain.runtime.base.errors import EnvironmentFault

# Values that may wait, about 40 MB: thousands of records of a dense model, dozens of one with very many experts.
ROOM: Final = 1_000_000
# Seconds between two polls.
LOOK: Final = 0.05


class BackgroundQueue:
    """Bounded queue whose thread, started with the first item, calls `carry` with each item.

    carry: must not raise. rest: called when the queue is empty; it may flush what a library buffers. room: number of
    values that may wait, in the sizes given to `put`.
    """

    def __init__(
        self,
        name: str,
        carry: Callable[[Any], None],
        *,
        rest: Callable[[], None] | None = None,
        room: int = ROOM,
    ) -> None:
        self.name, self.room = name, room
        self._carry, self._rest = carry, rest
        # (thing, number of values, event to set once it is processed)
        self._waiting: deque[tuple[Any, int, threading.Event | None]] = deque()
        # Each is written by one thread only, so that no lock is needed.
        self._given = self._taken = 0
        self._thread: threading.Thread | None = None
        self._wanted = threading.Event()
        self._beginning, self._carrying = threading.Lock(), threading.Lock()

    def put(self, thing: Any, size: int) -> bool:
        """Queue a thing without waiting; return False without room. size: its number of values.

        Always call it from the same thread; other threads, and things that must not be refused, use `send`.
        """
        if self._given - self._taken + size > self.room and self._waiting:
            return False
        self._given += size
        self._waiting.append((thing, size, None))
        if self._thread is None:
            self._begin()
        return True

    def send(self, thing: Any) -> None:
        """Queue a rare thing, which always finds room."""
        self._waiting.append((thing, 0, None))
        if self._thread is None:
            self._begin()

    def deliver(self, thing: Any | None, seconds: float | None) -> bool:
        """Queue a thing and return True if it and everything before it was processed within `seconds`.

        seconds: None waits forever. thing: None only waits for what came before.
        """
        carried = threading.Event()
        self._waiting.append((thing, 0, carried))
        if self._thread is None:
            self._begin()
        self._wanted.set()
        return carried.wait(seconds)

    def close(self, seconds: float) -> bool:
        """Process everything that waits and end the thread; return False if the thread hangs. A later item starts
        another one."""
        if self._thread is None and not self._waiting:
            return True
        if not self.deliver(None, seconds):
            return False
        with self._beginning:
            thread, self._thread = self._thread, None
        self._wanted.set()
        if thread is not None:
            thread.join(seconds)
        return True

    def _begin(self) -> None:
        with self._beginning:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self.name, daemon=True)
                self._thread = thread
                thread.start()

    def _run(self) -> None:
        own = threading.current_thread()
        while True:
            last = self._thread is not own
            with self._carrying:  # a thread that was closed may not have ended yet
                self._carry_all()
            if last:
                return
            self._wanted.wait(LOOK)
            self._wanted.clear()

    def _carry_all(self) -> None:
        while self._waiting:
            thing, size, carried = self._waiting.popleft()
            if thing is not None:
                self._carry(thing)
            self._taken += size
            if carried is not None:
                carried.set()
        if self._rest is not None:
            self._rest()


# Seconds to wait until an event is in its file: a disk that takes longer does not answer.
EVENT_SECONDS: Final = 2.0
_BLOCK: Final = 1 << 20


@define(eq=False)
class JsonLinesFile:
    """File that records are appended to. A line is written whole, so a reader never sees half of one for long.

    Half a line that a killed process or a full disk left is ended by the next writer, whose own lines stay whole. Zero
    bytes at the end, which file systems leave after a power cut, are cut off.
    """

    path: Path
    _fd: int | None = field(default=None, init=False)

    def write(self, record: Record) -> None:
        """Append a record. Raises EnvironmentFault if it cannot be written."""
        try:
            if self._fd is None:
                self._fd = self._opened()
            content = line_of(record)
            while content:
                content = content[os.write(self._fd, content) :]
        except OSError as error:
            with suppress(OSError):
                self.close()  # the file may end in half a line
            raise EnvironmentFault("X706", f"{self.path} cannot be written: {error.strerror}") from error

    def _opened(self) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        if not stat.S_ISREG(os.fstat(fd).st_mode):  # a pipe that nobody reads would block the run
            os.close(fd)
            raise OSError(errno.EINVAL, "it is not a regular file")
        size = os.fstat(fd).st_size
        if (end := _end_of_text(fd, size)) < size:
            os.ftruncate(fd, end)
        if end and os.pread(fd, 1, end - 1) != b"\n":
            os.write(fd, b"\n")
        return fd

    def close(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)


def _end_of_text(fd: int, size: int) -> int:
    """Return the length of a file without the zero bytes at its end."""
    while size:
        begin = max(0, size - _BLOCK)
        if text := os.pread(fd, size - begin, begin).rstrip(b"\0"):
            return begin + len(text)
        size = begin
    return 0


@define(eq=False)
class _Line:
    """Record in the queue of a file. awaited: a caller waits for its result."""

    lines: JsonLinesFile
    record: Record
    awaited: bool
    error: Exception | None = None


class BackgroundLines:
    """Writer of the records of several files, in order of arrival, in a thread of its own.

    Only callers that ask to wait for the disk. hangs: an awaited record was not written in time, and nothing has been
    written since; until then no caller waits.
    """

    def __init__(self, *, room: int = ROOM) -> None:
        self.hangs = False
        self._queue = BackgroundQueue("writing records", self._carry, room=room)
        self._fault: Exception | None = None

    def write(self, lines: JsonLinesFile, record: Record, size: int) -> bool:
        """Queue a record; return False without room. size: its number of values. Raises what `raise_fault` raises."""
        self.raise_fault()
        return self._queue.put(_Line(lines, record, awaited=False), size)

    def write_now(self, lines: JsonLinesFile, record: Record, seconds: float = EVENT_SECONDS) -> None:
        """Queue a record, which always finds room, and wait up to `seconds` until it is written.

        Raises EnvironmentFault if it cannot be written.
        """
        line = _Line(lines, record, awaited=seconds > 0 and not self.hangs)
        if not line.awaited:
            self._queue.send(line)
            return
        line.awaited = self._queue.deliver(line, seconds)
        self.hangs = not line.awaited
        if line.error is not None:
            raise line.error

    def settle(self, seconds: float | None) -> bool:
        """Return True if everything is written within `seconds`. Raises the first error of writing."""
        settled = self._queue.deliver(None, seconds)
        self.raise_fault()
        return settled

    def close(self, seconds: float) -> bool:
        """Write everything and end the thread; return False if that takes more than `seconds`."""
        return self._queue.close(seconds)

    def raise_fault(self) -> None:
        """Raise the error of the first record that could not be written and that no caller waited for."""
        if self._fault is not None:
            raise self._fault

    def _carry(self, line: _Line) -> None:
        try:
            line.lines.write(line.record)
        except Exception as error:  # raised in the thread of a caller
            line.error = error
            if not line.awaited and self._fault is None:
                self._fault = error
        self.hangs = False


class Sizes:
    """Number of values of step records: cheap, because records with equally many keys count as equally large."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}

    def of(self, record: StepMetrics | RankMetrics) -> int:
        size = self._known.get(len(record.rest))
        if size is None:
            inside = sum(len(value) for value in record.rest.values() if isinstance(value, list | dict))
            size = self._known[len(record.rest)] = len(record.rest) + inside
        nodes = record.node_seconds if isinstance(record, RankMetrics) else None
        return size + len(nodes or ()) + len(record.__struct_fields__)


@define(eq=False)
class QueuedLines:
    """File of records that are written without waiting. lost: records refused because the disk did not keep up."""

    lines: JsonLinesFile
    writer: BackgroundLines
    lost: int = 0
    _sizes: Sizes = field(factory=Sizes)

    def write(self, record: StepMetrics | RankMetrics) -> bool:
        """Queue a record; return False without room. A record has the number of refused ones before it (`dropped`), if
        any.

        Raises EnvironmentFault if an earlier record could not be written.
        """
        size = self._sizes.of(record)
        counted = msgspec.structs.replace(record, dropped=self.lost) if self.lost else record
        written = self.writer.write(self.lines, counted, size)
        self.lost += not written
        return written


def last_step(path: Path) -> int:
    """Return the step of the last whole record of a file; 0 without one."""
    with suppress(OSError), open_regular(path) as file:
        step = (object_of(_last_line(file)[1]) or {}).get("step")
        return step if isinstance(step, int) else 0
    return 0


def add_to_last(path: Path, metrics: StepMetrics) -> bool:
    """Add metrics to the last record of a file if it is of the same step; return False otherwise.

    The record keeps its `time`. The file is replaced by a new one, so that a reader never sees half of it. Raises
    OSError.
    """
    rest = path.with_suffix(".tmp")
    with open_regular(path) as file:
        begin, line = _last_line(file)
        record = object_of(line) or {}
        if record.get("step") != metrics.step or "time" not in record:
            return False
        file.seek(0)
        with rest.open("wb") as new:
            left = begin
            while left and (block := file.read(min(left, _BLOCK))):
                new.write(block)
                left -= len(block)
            new.write(json_line({**record, **as_object(metrics), "time": record["time"]}))
            new.flush()
            os.fsync(new.fileno())
    rest.replace(path)
    durable.sync(path.parent)
    return True


def _last_line(file: BinaryIO) -> tuple[int, bytes]:
    """Return the offset of the last line and its content without the newline."""
    end = file.seek(0, os.SEEK_END)
    begin, tail = end, b""
    while begin and b"\n" not in tail[:-1]:
        begin = max(0, begin - _BLOCK)
        file.seek(begin)
        tail = file.read(end - begin)
    line = tail.rstrip(b"\n").rpartition(b"\n")[2]
    return begin + len(tail.rstrip(b"\n")) - len(line), line


def size_of(path: Path) -> int:
    """Return the bytes of a file; 0 if it does not exist."""
    return path.stat().st_size if path.exists() else 0


def trim_after(path: Path, step: int, superseded: Path) -> int:
    """Move the records of steps after `step`, which are about to be computed again, from a metrics file to
    `superseded`.

    Returns the number of moved records.
    """
    if not path.exists():
        return 0
    keep: list[bytes] = []
    drop: list[bytes] = []
    for line in path.read_bytes().splitlines(keepends=True):
        record_step = (object_of(line) or {}).get("step")
        late = not isinstance(record_step, int) or record_step > step  # or the torn last line of a killed run
        (drop if late else keep).append(line)
    if drop:
        superseded.parent.mkdir(parents=True, exist_ok=True)
        with superseded.open("ab") as out:
            out.writelines(drop)
            out.flush()
            os.fsync(out.fileno())
        durable.sync(superseded.parent)
        durable.sync(superseded.parent.parent)
        durable.write(path, b"".join(keep))
    return len(drop)
