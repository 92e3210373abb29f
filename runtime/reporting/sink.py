"""Whoever takes the records of a run besides its files: each in a thread of its own, and none can hold up training."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import inf
from typing import Final, Protocol

from xtrain.records.event import Event
from xtrain.records.metrics import StepMetrics
from xtrain.runtime.errors import EnvironmentFault
from xtrain.runtime.files.background_queue import BackgroundQueue
from xtrain.runtime.files.lines import Sizes

# Seconds that a checkpoint waits for what lies behind a local disk.
SETTLE_SECONDS: Final = 5.0


class RecordWriter(Protocol):
    """Takes records as they are written to metrics.jsonl and events.jsonl. All calls come from one thread.

    Whatever is raised is told in a warning, and the writer gets nothing more. name: for people. seconds: how long
    `end` may take. local: whether what it has taken is to be safe before a checkpoint is.
    """

    name: str
    seconds: float
    local: bool

    def begin(self) -> None:
        """Load the library and open what is written to."""
        ...

    def metric(self, record: StepMetrics) -> None: ...

    def event(self, record: Event) -> None: ...

    def rest(self, *, must: bool) -> None:
        """Nothing waits: make lasting what is held back. must: whatever that costs."""
        ...

    def end(self, exit_code: int) -> None: ...


def _nothing() -> None:
    pass


class RecordSink:
    """A writer and what is on its way to it. warn: is told in words what goes wrong."""

    def __init__(self, writer: RecordWriter, warn: Callable[[str], None]) -> None:
        self.writer, self.lost = writer, 0
        self._warn, self._failed, self._begun, self._late = warn, False, False, False
        self._sizes = Sizes()
        self._queue = BackgroundQueue(writer.name, self._carry, rest=partial(self._rest, must=False))

    def begin(self) -> None:
        """Load the library now, beside the set-up, and not with the first record."""
        self._queue.send(_nothing)

    def metric(self, record: StepMetrics) -> None:
        """Never waits; a record that finds no room is lost to this writer."""
        if not self._failed and not self._queue.put(partial(self.writer.metric, record), self._sizes.of(record)):
            self.lost += 1

    def event(self, record: Event) -> None:
        """Never waits. Any thread."""
        if not self._failed:
            self._queue.send(partial(self.writer.event, record))

    def settle(self) -> None:
        """What lies on a local disk in the end is there, unless that takes too long."""
        if self.writer.local and not self._failed and not self._late:
            self._late = not self._queue.deliver(partial(self._rest, must=True), SETTLE_SECONDS)

    def end(self, exit_code: int, seconds: float = inf) -> None:
        """Hand over what waits, and take leave, in at most so many seconds."""
        seconds = min(seconds, self.writer.seconds)
        self._queue.send(partial(self.writer.end, exit_code))
        ended = self._queue.close(seconds)
        if not ended and not self._failed:
            self._try_to_warn(f"{self.writer.name} did not finish within {seconds:g} s, and was abandoned")
        if self.lost:
            self._try_to_warn(f"{self.lost} records were not sent to {self.writer.name}, which was too slow")

    def _try_to_warn(self, message: str) -> None:
        with suppress(EnvironmentFault):  # of a disk that takes no event; somebody else says so
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
