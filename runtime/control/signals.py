"""Signals become requests that all ranks agree on at the next step boundary; nothing is torn down inside a handler."""

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from attrs import define, field

from xtrain.records.end_status import EndStatus
from xtrain.runtime.monitoring.failing import say
from xtrain.runtime.outcome import EXIT_CODES

# Seconds within which the second Ctrl-C that has ended another rank comes to this one.
SECOND_INTERRUPT_SECONDS = 0.5
# A closed terminal asks for the same as SIGTERM.
EVENTS = {
    signal.SIGTERM: "sigterm",
    signal.SIGHUP: "sigterm",
    signal.SIGINT: "sigint",
    signal.SIGUSR1: "sigusr1",
}


def stop_signals() -> tuple[signal.Signals, ...]:
    """Those that ask this process to stop: under `nohup`, a terminal that is closed does not."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in EVENTS if not (ignored and number is signal.SIGHUP))


def killed_by(number: int) -> str:
    """`killed by SIGKILL`; not all signals have names."""
    named = number in {each.value for each in signal.Signals}
    return f"killed by {signal.Signals(number).name if named else f'signal {number}'}"


def end_at_once() -> None:
    """Let signals end this process: before training there is nothing to save, and a rank that waits for one that will
    never come runs no Python that could handle them."""
    for number in stop_signals():
        signal.signal(number, signal.SIG_DFL)


def answer_at_once(answer: Callable[[int], None]) -> None:
    """Have a thread call `answer` with the first signal that comes before training. It does so too where the main
    thread waits for a rank that will never come, and runs no Python. Main thread only."""
    for number in stop_signals():
        signal.signal(number, lambda *_: None)
    read_end = _numbers_of_signals()

    def wait() -> None:
        answer(os.read(read_end, 1)[0])

    threading.Thread(target=wait, name="signals before training", daemon=True).start()


def _numbers_of_signals() -> int:
    """Return a file descriptor from which a thread reads a byte for each signal as it comes, also of those that come
    while the main thread waits for another rank. Main thread only."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    return read_end


def _leave_on_second_interrupt(read_end: int) -> None:
    interrupts = 0
    while interrupts < 2:
        interrupts += os.read(read_end, 1) == bytes([signal.SIGINT])
    os._exit(EXIT_CODES[EndStatus.INTERRUPTED])  # a second Ctrl-C means now


@define
class StopRequests:
    """The signals this rank has received. `report` is told why, should the rank have to be ended at its deadline.

    answered: what is declared for the event has been done, and the rank only has to leave.
    """

    deadline_seconds: float
    report: Callable[[str], None]
    received: list[str] = field(factory=list)
    answered: bool = False
    _watchdog: threading.Timer | None = None
    _until: float | None = None

    def listen(self) -> None:
        for number in stop_signals():
            signal.signal(number, self._on_signal)
        threading.Thread(
            target=_leave_on_second_interrupt, args=(_numbers_of_signals(),), name="second Ctrl-C", daemon=True
        ).start()

    def hurry(self, event: str) -> None:
        """From now on the deadline runs: the run is to stop because of `event`. Only the first call counts."""
        if self._watchdog is None:
            self._until = time.monotonic() + self.deadline_seconds
            # A rank that hangs in a collective never reaches the boundary: it must not outlive its deadline.
            self._watchdog = threading.Timer(self.deadline_seconds, self._give_up, (event,))
            self._watchdog.daemon = True
            self._watchdog.start()

    def left(self, keep: float = 0.0) -> float:
        """Seconds until the deadline, at least 0, but for the share `keep` of what was given; without a stop as many as
        one would give."""
        whole = self.deadline_seconds if self._until is None else self._until - time.monotonic()
        return max(0.0, whole - keep * self.deadline_seconds)

    def rest(self) -> None:
        """The run has stopped in time."""
        if self._watchdog is not None:
            self._watchdog.cancel()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        event = EVENTS[signal.Signals(number)]
        self.received.append(event)
        self.hurry(event)

    def _give_up(self, event: str) -> None:
        what = "and was killed without saving"
        if self.answered:
            what = "although all of its actions were done, and was killed"
        message = f"{event}: the rank did not exit within {self.deadline_seconds:g} s, {what}"
        say(message)
        self.report(message)
        os._exit(1)
