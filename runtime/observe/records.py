"""Records of a run: metrics and events, written to their files and to trackers (`log { … }`).

Files and trackers are written by threads of their own and cannot delay training.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from attrs import define, field, frozen
from msgspec.structs import replace

from xtrain.dsl.values import masked
from xtrain.plan.plan import Plan
from xtrain.records.events import WarningEvent
from xtrain.records.lines import Event, as_object, free_texts, plain_value, read
from xtrain.records.metrics import StepMetrics
from xtrain.records.names import EVENTS_FILE, METRICS_FILE, rank_lines_path
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.json_lines import (
    EVENT_SECONDS,
    BackgroundLines,
    BackgroundQueue,
    JsonLinesFile,
    QueuedLines,
    Sizes,
    add_to_last,
    last_step,
    trim_after,
)
from xtrain.runtime.base.process import ReplicaGroup
from xtrain.runtime.observe.provenance import typed_value

if TYPE_CHECKING:
    from xtrain.runtime.base.state import Progress


# Seconds that a checkpoint waits for trackers that write to a local disk.
TRACKER_SETTLE_SECONDS: Final = 5.0


class RecordWriter(Protocol):
    """Receiver of records, as they are written to metrics.jsonl and events.jsonl. All calls come from one thread.

    If a method raises, the run warns and the writer gets nothing more. name: for people. seconds: how long `end` may
    take. local: its records must be safe before a checkpoint is.
    """

    name: str
    seconds: float
    local: bool

    def begin(self) -> None:
        """Load the library and open the output."""
        ...

    def metric(self, record: StepMetrics) -> None: ...

    def event(self, record: Event) -> None: ...

    def rest(self, *, must: bool) -> None:
        """Flush what is held back, as nothing waits. must: whatever it costs."""
        ...

    def end(self, exit_code: int) -> None: ...


def _nothing() -> None:
    pass


class RecordSink:
    """Queue of a writer. warn: called with a message if the writer fails."""

    def __init__(self, writer: RecordWriter, warn: Callable[[str], None]) -> None:
        self.writer, self.lost = writer, 0
        self._warn, self._failed, self._begun, self._late = warn, False, False, False
        self._sizes = Sizes()
        self._queue = BackgroundQueue(writer.name, self._carry, rest=partial(self._rest, must=False))

    def begin(self) -> None:
        """Load the library now, in parallel with the set-up, not with the first record."""
        self._queue.send(_nothing)

    def metric(self, record: StepMetrics) -> None:
        """Queue a record without waiting; without room it is lost to this writer."""
        if not self._failed and not self._queue.put(partial(self.writer.metric, record), self._sizes.of(record)):
            self.lost += 1

    def event(self, record: Event) -> None:
        """Queue an event without waiting. Any thread."""
        if not self._failed:
            self._queue.send(partial(self.writer.event, record))

    def settle(self) -> None:
        """Flush a writer to a local disk, unless that takes too long."""
        if self.writer.local and not self._failed and not self._late:
            self._late = not self._queue.deliver(partial(self._rest, must=True), TRACKER_SETTLE_SECONDS)

    def end(self, exit_code: int, seconds: float = inf) -> None:
        """Write what waits and end the writer, in at most `seconds`."""
        seconds = min(seconds, self.writer.seconds)
        self._queue.send(partial(self.writer.end, exit_code))
        ended = self._queue.close(seconds)
        if not ended and not self._failed:
            self._try_to_warn(f"{self.writer.name} did not finish within {seconds:g} s, and was abandoned")
        if self.lost:
            self._try_to_warn(f"{self.lost} records were not sent to {self.writer.name}, which was too slow")

    def _try_to_warn(self, message: str) -> None:
        with suppress(EnvironmentFault):  # a disk that takes no event; the fault is reported elsewhere
            self._warn(message)

    def _carry(self, call: Callable[[], None]) -> None:
        self._attempt(call)
        self._late = False

    def _rest(self, *, must: bool) -> None:
        self._attempt(partial(self.writer.rest, must=must))

    def _attempt(self, call: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            if not self._begun:
                self._begun = True
                self.writer.begin()
            call()
        except Exception as error:  # a library may fail in any way, and training must not
            self._failed = True
            reason = str(error).strip().splitlines() or [type(error).__name__]
            self._try_to_warn(f"{self.writer.name} gets no more records: {reason[0]}; metrics.jsonl is complete")


# Seconds that a caller who needs all records in their files waits for a disk.
SETTLE_SECONDS: Final = 60.0
# Seconds for unwritten records at the end.
CLOSE_SECONDS: Final = 10.0
# Records that a rank keeps because another rank, which may be lost before, is to write them.
MOST_UNWRITTEN: Final = 256


@define(eq=False)
class Records:
    """Records that a rank reports.

    The first rank writes `metrics` and `events`; every rank writes `own`. With replica groups the first rank of the
    leading group writes; a rank that takes over from a lost one writes the records of the last steps if they are
    missing.

    A step has one record: values that are logged and measured after it are gathered in `pending`, and written once the
    step has no more. A thread writes them: a step does not wait for a disk. Events are written in order with records,
    and waited for: everything before an event is in the files, except the record of the current step. Errors of a disk
    are raised by the next report.
    """

    directory: Path
    rank: int
    writer: BackgroundLines
    metrics: QueuedLines
    own: QueuedLines
    events: JsonLinesFile
    group: ReplicaGroup | None = None
    pending: StepMetrics | None = None
    sinks: list[RecordSink] = field(factory=list)
    begin_speaking: list[Callable[[], None]] = field(factory=list)
    """Actions before the first record, on a first rank whose group does not lead yet."""
    variables: frozenset[str] = frozenset()
    """Environment variables that the spec hides: no text of an event quotes their values."""
    _last_step: int | None = None
    """Step of the last record in `metrics`; None: read it from the file."""
    _reported_lost: bool = False
    _closed: bool = False
    _unwritten: deque[StepMetrics] = field(factory=lambda: deque(maxlen=MOST_UNWRITTEN))
    """The last records that were another group's to write."""

    @property
    def first(self) -> bool:
        """True on the first rank of the run, or of a replica group."""
        return self.rank == (0 if self.group is None else self.group.first)

    @property
    def speaks(self) -> bool:
        """True on the rank that writes the records of the whole run."""
        return self.first and (self.group is None or self.group.leads)

    @classmethod
    def open(cls, directory: Path, rank: int, group: ReplicaGroup | None = None) -> "Records":
        writer = BackgroundLines()
        return cls(
            directory=directory,
            rank=rank,
            writer=writer,
            metrics=QueuedLines(JsonLinesFile(directory / METRICS_FILE), writer),
            own=QueuedLines(JsonLinesFile(rank_lines_path(directory, rank)), writer),
            events=JsonLinesFile(directory / EVENTS_FILE),
            group=group,
        )

    def event(self, event: Event, *, every_rank: bool = False) -> None:
        """Report an event; only the first rank writes, unless the event is a rank's own.

        Raises EnvironmentFault if it cannot be written.
        """
        if self.speaks or every_rank:
            self._event(event)

    def warn(self, message: str, *, step: int, code: str = "", every_rank: bool = False) -> None:
        """Report that something was left out or has failed."""
        self.event(WarningEvent(step=step, message=message, code=code), every_rank=every_rank)

    def _event(self, event: Event, seconds: float = EVENT_SECONDS) -> None:
        if self.variables:
            texts = {name: self.without_values(getattr(event, name)) for name in free_texts(type(event))}
            event = replace(event, **texts)
        for sink in self.sinks:
            sink.event(event)
        if self._closed:
            self.events.write(event)
        else:
            self.writer.write_now(self.events, event, seconds)

    def without_values(self, value: Any) -> Any:
        """Return texts with `env(NAME)` instead of the values of `variables`."""
        return masked(value, self.variables, os.environ)

    def log(self, metrics: StepMetrics) -> None:
        """Add the record of the step that has just ended. Never waits."""
        self.pending = replace(metrics, rest=self.pending.rest | metrics.rest) if self.pending else metrics

    def measured(self, values: dict[str, Any]) -> None:
        """Add named numbers to the record of the step that has just ended. Never waits."""
        before = self.pending or StepMetrics(step=None, time=None)
        self.pending = replace(before, rest=before.rest | values)

    def flush(self, step: int) -> None:
        """Write the record of the finished step, if anything was added to it.

        If the file has a record of that step already, as after a stop with an evaluation, the values are added to that
        record; only then it waits. Raises EnvironmentFault if an earlier record could not be written.
        """
        self.writer.raise_fault()
        pending, self.pending = self.pending, None
        if pending is None or not self.first:
            return
        record = replace(pending, step=step, time=pending.time or time.time())
        if not self.speaks:
            self._unwritten.append(record)
            self._last_step = None
            return
        while self.begin_speaking:
            self.begin_speaking.pop(0)()
        while self._unwritten:
            before = self._unwritten.popleft()
            if self._step_of_last() < (before.step or 0) < step:
                self._write(before)
        self._write(record)

    def _write(self, record: StepMetrics) -> None:
        step = record.step or 0
        for sink in self.sinks:
            sink.metric(record)
        if self._step_of_last() == step and self._added(record):
            return
        self._last_step = step
        if self.metrics.write(record) and not self._reported_lost:
            self._warn_of_lost(step)

    def unwritten(self) -> dict[str, Any]:
        """Return `record`, the record of the finished step that is in no file yet, as JSON."""
        return {} if self.pending is None else {"record": plain_value(as_object(self.pending))}

    def go_on_with(self, record: dict[str, Any], step: int) -> None:
        """Restore the unwritten record of the step that the run resumes after, unless it is in the file."""
        if self.speaks and self._step_of_last() < step:
            self.pending = read(StepMetrics, record)

    def _step_of_last(self) -> int:
        if self._last_step is None:
            self._last_step = last_step(self.metrics.lines.path)
        return self._last_step

    def _added(self, record: StepMetrics) -> bool:
        """Add a record to the last one in the file; return False if that fails."""
        with suppress(OSError):
            if self.writer.settle(EVENT_SECONDS):
                self.metrics.lines.close()
                return add_to_last(self.metrics.lines.path, record)
        return False

    def settle(self, step: int = 0) -> None:
        """Wait until everything reported is in its file; warn if the disk does not answer in time.

        Raises EnvironmentFault if something could not be written.
        """
        if not self.writer.settle(SETTLE_SECONDS):
            message = (
                f"rank {self.rank}: the disk of {self.directory} did not write all records within {SETTLE_SECONDS:g} s;"
            )
            message += " if the run is killed before it does, these records are lost"
            self._event(WarningEvent(step=step, message=message), seconds=0)
        for sink in self.sinks:
            sink.settle()

    def undo_after(self, step: int) -> None:
        """Move the records of later steps out of metrics.jsonl: they will be computed again. Raises OSError."""
        self.writer.settle(None)
        self.metrics.lines.close()
        self._last_step = None
        superseded = self.directory / "logs" / f"metrics-superseded-{time.strftime('%Y%m%d-%H%M%S')}.jsonl"
        trim_after(self.metrics.lines.path, step, superseded)

    def reopen(self) -> None:
        """Continue writing under the names of the files, which may have been moved."""
        self.writer.settle(EVENT_SECONDS)
        for lines in (self.metrics.lines, self.events, self.own.lines):
            lines.close()

    def attempts(self) -> int:
        """Return the number of earlier starts of this run."""
        if not self.events.path.exists():
            return 0
        with self.events.path.open("rb") as lines:
            return sum(b'"event":"run_start"' in line for line in lines)

    def end_sinks(self, exit_code: int, seconds: float) -> None:
        """End all trackers after they got everything that was reported, each in at most `seconds`."""
        ending, self.sinks = self.sinks, []  # reports about one tracker must not go to another that has ended
        for sink in ending:
            sink.end(exit_code, seconds)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Write what can be written in `seconds`; later reports are written directly."""
        lost = self.metrics.lost + self.own.lost
        if self.speaks and lost and not self._reported_lost:
            self._warn_of_lost(0)
        if self.writer.close(seconds):  # otherwise a thread hangs in one of the files
            self._closed = True
            for lines in (self.metrics.lines, self.events, self.own.lines):
                lines.close()

    def _warn_of_lost(self, step: int) -> None:
        """Warn once that records are missing; the records themselves have the number."""
        if lost := self.metrics.lost + self.own.lost:
            self._reported_lost = True
            message = f"{lost} records were dropped: the disk of {self.directory} was too slow"
            self._event(WarningEvent(step=step, message=message), seconds=0)


@frozen(kw_only=True)
class TrackerContext:
    """Facts of a run for a tracker that begins.

    directory: of the run, where a tracker keeps its files. step: the step that this start resumes after, 0 at the first
    start; records of later steps from an earlier start are void. rolled_back: number of steps that rollbacks have
    undone so far. plan: of the run. warn: records a warning for people.
    """

    directory: Path
    step: int
    rolled_back: int
    plan: Plan
    warn: Callable[[str], None]

    @property
    def settings(self) -> Mapping[str, Any]:
        """Every resolved setting as nested maps, `{"optimizer": {"lr": 0.0003, …}, …}`, with the plan's ids."""
        nested: dict[str, Any] = {"plan_id": self.plan.id, "config_id": self.plan.config_id}
        for entry in self.plan.provenance:
            *blocks, name = entry.path.split(".")
            inner = nested
            for block in blocks:
                before = inner.get(block, {})
                # A value with settings of its own, as a source.
                inner[block] = before if isinstance(before, dict) else {"kind": before}
                inner = inner[block]
            inner[name] = typed_value(entry.value)
        nested.setdefault("experiment", {}).setdefault("name", self.plan.name)
        return nested


@frozen
class Trackers:
    """Start of trackers, passed to their ops `setup.log.NAME`."""

    plan: Plan
    records: Records
    progress: "Progress"

    def begin(self, make: Callable[[TrackerContext], RecordWriter]) -> None:
        """Create a tracker and give it all records from now on. Only the first rank creates it; with replica groups the
        first rank of a group does so when the group begins to lead."""
        if self.records.speaks:
            self._begin(make)
        elif self.records.first:
            self.records.begin_speaking.append(lambda: self._begin(make))

    def _begin(self, make: Callable[[TrackerContext], RecordWriter]) -> None:
        context = TrackerContext(
            directory=self.records.directory,
            step=self.progress.step,
            rolled_back=sum(before - after for before, after in self.progress.bad.went_back),
            plan=self.plan,
            warn=self._warn,
        )
        try:
            writer = make(context)
        except Exception as error:  # training continues without it, as after any later failure
            self._warn(f"a tracker gets no records: {type(error).__name__}: {error}; metrics.jsonl is complete")
            return
        sink = RecordSink(writer, self._warn)
        self.records.sinks.append(sink)
        sink.begin()

    def _warn(self, message: str) -> None:
        self.records.warn(message, step=self.progress.step)
