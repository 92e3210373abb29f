"""The files that a run writes: metrics, events, and each rank's own numbers, one JSON object a line."""

import json
import math
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

from ..errors import EnvironmentFault


def _plain(value: Any) -> Any:
    # JSON has no word for these; a reader that is not Python would refuse the whole line.
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


@define
class JsonLines:
    """Appends records to a file. A line reaches the file as a whole, so a reader never sees half of one for long.

    Half a line that a killed process or a full disk has left is ended by the next writer, whose own lines stay whole.
    """

    path: Path
    _fd: int | None = field(default=None, init=False)

    def write(self, record: dict[str, Any]) -> None:
        """Raises EnvironmentFault where the disk does not take it."""
        line = json.dumps({k: _plain(v) for k, v in record.items()}, separators=(",", ":"), ensure_ascii=False)
        try:
            if self._fd is None:
                self._fd = self._opened()
            content = (line + "\n").encode(errors="backslashreplace")  # names of files may be no text
            while content:
                content = content[os.write(self._fd, content) :]
        except OSError as error:
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
            os.close(self._fd)
            self._fd = None


@frozen
class Records:
    """Where a rank reports. `metrics` and `events` are written by the first rank alone, `own` by every rank."""

    directory: Path
    rank: int
    metrics: JsonLines
    events: JsonLines
    own: JsonLines
    pending: dict[str, Any] = field(factory=dict)

    @classmethod
    def open(cls, directory: Path, rank: int) -> "Records":
        return cls(
            directory=directory,
            rank=rank,
            metrics=JsonLines(directory / "metrics.jsonl"),
            events=JsonLines(directory / "events.jsonl"),
            own=JsonLines(directory / "ranks" / f"{rank:05d}.jsonl"),
        )

    def event(self, event: str, *, step: int, every_rank: bool = False, **fields: Any) -> None:
        """Report something that happened; only the first rank writes, unless the event is a rank's own."""
        if self.rank == 0 or every_rank:
            self.events.write({"time": time.time(), "step": step, "event": event, **fields})

    def metric(self, record: dict[str, Any]) -> None:
        """Write the record of a step, with what was added to it meanwhile."""
        if self.rank == 0:
            self.metrics.write({**record, **self.pending})
        self.pending.clear()

    def add_to_metric(self, fields: dict[str, Any]) -> None:
        """Numbers that belong into the record of the step that has just ended."""
        self.pending.update(fields)

    def flush(self, step: int) -> None:
        """Write what was added and has found no record, as a record of its own."""
        if self.pending:
            self.metric({"step": step, "time": time.time()})

    def undo_after(self, step: int) -> None:
        """Move the records of later steps out of metrics.jsonl: they will be computed again. Raises OSError."""
        self.metrics.close()
        superseded = self.directory / "logs" / f"metrics-superseded-{time.strftime('%Y%m%d-%H%M%S')}.jsonl"
        trim_after(self.metrics.path, step, superseded)

    def attempts(self) -> int:
        """How often this run has been started before."""
        if not self.events.path.exists():
            return 0
        with self.events.path.open("rb") as lines:
            return sum(b'"event":"run_start"' in line for line in lines)

    def close(self) -> None:
        for lines in (self.metrics, self.events, self.own):
            lines.close()


def size_of(path: Path) -> int:
    """Bytes of a file; 0 if there is none."""
    return path.stat().st_size if path.exists() else 0


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
