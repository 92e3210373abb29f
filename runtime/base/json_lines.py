"""Files with one JSON object per line, written directly or by a background thread.

`BackgroundQueue` is a bounded queue with a thread, so that the training loop never waits for a disk or a network. If
the thread falls behind, new items are refused and the caller counts them. Adding an item only appends to a list: the
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
# Seconds between two looks.
LOOK: Final = 0.05


class BackgroundQueue:
    """Calls `carry` with each thing that was put, in a thread that begins with the first one.

    carry: must not raise. rest: called when nothing waits any more; it may make lasting what a library holds back.
    room: how many values may wait, as `put` is told.
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
        # (thing, values, what to set when it was carried off)
        self._waiting: deque[tuple[Any, int, threading.Event | None]] = deque()
        # Each is changed by one thread alone, so that no lock is needed.
        self._given = self._taken = 0
        self._thread: threading.Thread | None = None
        self._wanted = threading.Event()
        self._beginning, self._carrying = threading.Lock(), threading.Lock()

    def put(self, thing: Any, size: int) -> bool:
        """Hand it on without waiting; False where there is no room. size: how many values it has.

        Always by the same thread; others, and whatever must not be refused, use `send`.
        """
        if self._given - self._taken + size > self.room and self._waiting:
            return False
        self._given += size
        self._waiting.append((thing, size, None))
        if self._thread is None:
            self._begin()
        return True

    def send(self, thing: Any) -> None:
        """Hand on what comes seldom and always finds room."""
        self._waiting.append((thing, 0, None))
        if self._thread is None:
            self._begin()

    def deliver(self, thing: Any | None, seconds: float | None) -> bool:
        """Hand it on, and say whether it and all before it was carried off within so many seconds; None: however long
        that takes. thing: None where only what came before matters."""
        carried = threading.Event()
        self._waiting.append((thing, 0, carried))
        if self._thread is None:
            self._begin()
        self._wanted.set()
        return carried.wait(seconds)

    def close(self, seconds: float) -> bool:
        """Wait for all that waits, and end the thread; False if it hangs and is left behind. What is put later begins
        another."""
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
            with self._carrying:  # another one may not have ended yet
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


# Seconds that an event is waited for, to be in its file: a disk that takes longer does not answer.
EVENT_SECONDS: Final = 2.0
_BLOCK: Final = 1 << 20


@define(eq=False)
class JsonLinesFile:
    """Appends records to a file. A line reaches the file as a whole, so a reader never sees half of one for long.

    Half a line that a killed process or a full disk has left is ended by the next writer, whose own lines stay whole.
    Zero bytes at the end, which file systems leave after a power cut where a line had no data yet, are cut off.
    """

    path: Path
    _fd: int | None = field(default=None, init=False)

    def write(self, record: Record) -> None:
        """Raises EnvironmentFault where the disk does not take it."""
        try:
            if self._fd is None:
                self._fd = self._opened()
            content = line_of(record)
            while content:
                content = content[os.write(self._fd, content) :]
        except OSError as error:
            with suppress(OSError):
                self.close()  # half a line may stand there
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
    """A record on its way to a file. awaited: somebody wants to know what became of it."""

    lines: JsonLinesFile
    record: Record
    awaited: bool
    error: Exception | None = None


class BackgroundLines:
    """Writes the records of several files in the order in which they come, in a thread of its own.

    Nobody waits for a disk but those who ask to. hangs: what was waited for was not written in time, and nothing has
    been since: until it is, nobody waits again.
    """

    def __init__(self, *, room: int = ROOM) -> None:
        self.hangs = False
        self._queue = BackgroundQueue("writing records", self._carry, room=room)
        self._fault: Exception | None = None

    def write(self, lines: JsonLinesFile, record: Record, size: int) -> bool:
        """Whether there was room to wait in. size: how many values it has. Raises what `raise_fault` does."""
        self.raise_fault()
        return self._queue.put(_Line(lines, record, awaited=False), size)

    def write_now(self, lines: JsonLinesFile, record: Record, seconds: float = EVENT_SECONDS) -> None:
        """Write behind all that came before, and return when that is done or so many seconds have passed.

        Raises EnvironmentFault where the disk does not take it. There is always room for it.
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
        """Whether all is in its file, within so many seconds. Raises what has gone wrong."""
        settled = self._queue.deliver(None, seconds)
        self.raise_fault()
        return settled

    def close(self, seconds: float) -> bool:
        """Whether all was written that can be, within so many seconds; the thread has ended then."""
        return self._queue.close(seconds)

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

    def of(self, record: StepMetrics | RankMetrics) -> int:
        size = self._known.get(len(record.rest))
        if size is None:
            size = self._known[len(record.rest)] = _size_of_rest(record.rest)
        nodes = record.node_seconds if isinstance(record, RankMetrics) else None
        return size + len(nodes or ()) + len(record.__struct_fields__)


@define(eq=False)
class QueuedLines:
    """A file of records that nobody waits for. lost: how many found no room, because the disk did not keep up."""

    lines: JsonLinesFile
    writer: BackgroundLines
    lost: int = 0
    _sizes: Sizes = field(factory=Sizes)

    def write(self, record: StepMetrics | RankMetrics) -> bool:
        """Whether it is on its way to the file; a record says how many before it are not (`dropped`), if any.

        Raises EnvironmentFault where the disk did not take an earlier one.
        """
        size = self._sizes.of(record)
        found = msgspec.structs.replace(record, dropped=self.lost) if self.lost else record
        written = self.writer.write(self.lines, found, size)
        self.lost += not written
        return written


def _size_of_rest(rest: dict[str, Any]) -> int:
    return len(rest) + sum(len(value) for value in rest.values() if isinstance(value, list | dict))


def last_step(path: Path) -> int:
    """The step of the last record of a file; 0 where there is none that is whole."""
    with suppress(OSError), open_regular(path) as file:
        step = (object_of(_last_line(file)[1]) or {}).get("step")
        return step if isinstance(step, int) else 0
    return 0


def add_to_last(path: Path, metrics: StepMetrics) -> bool:
    """Add what was measured to the last record of a file if it is that of the same step. The file is replaced by
    another one, as a reader must not see half of it.

    `time` of the record stays. Whether there was such a record. Raises OSError.
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
        found = (object_of(line) or {}).get("step")
        late = not isinstance(found, int) or found > step  # or the torn last line of a killed run
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
