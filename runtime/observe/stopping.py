"""Failures and signals of a process: the failure record of a rank, stop requests, and commands of other programs.

A signal becomes a request that all ranks agree on at the next step boundary. Nothing is torn down inside a handler.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Final

from attrs import define, field

from xtrain.records.events import FailureEvent
from xtrain.records.names import EndStatus
from xtrain.runtime.base.errors import EXIT_CODES, DataError, EnvironmentFault
from xtrain.runtime.base.ops import PlanMismatch
from xtrain.runtime.base.user_parts import PartFailed
from xtrain.runtime.observe.records import Records


def report_failure(
    records: Records,
    error: BaseException,
    *,
    step: int,
    place: str,
    exit_code: int,
    trace: bool,
    more: str = "",
    quiet: bool = False,
) -> None:
    """Report an error.

    place: current node. trace: its traceback is useful; of errors in the user's code the part from there on. more: a
    line added to its message. quiet: the first rank prints what this one has reported.

    In the record, `agreed`: every rank finds the same, and another start would too. `lost`: the reason is another
    rank's.
    """
    lost = lost_a_peer(error)
    own = isinstance(error, PartFailed)
    text = error.trace if own else "".join(traceback.format_exception(error))
    message = str(error) or repr(error)
    if more:
        message, text = f"{message}\n{more}", f"{text}{more}\n"
    said = text if trace or lost else message  # an expected error needs no traceback
    said = records.without_values(f"{text}{message}" if own else said)
    if not quiet:
        say(said)
    if lost:
        message = f"lost contact with another rank in {place}"
    agreed = bool(getattr(error, "agreed", False))
    event = FailureEvent(
        step=step,
        rank=records.rank,
        error=message,
        exit_code=exit_code,
        traceback=text if trace else "",
        code=error.code if isinstance(error, EnvironmentFault | DataError) else "",
        agreed=agreed or isinstance(error, PlanMismatch),
        lost=lost,
    )
    try:
        records.event(event, every_rank=not agreed)
    except EnvironmentFault:
        if quiet:  # no other rank knows of it
            say(said)


def report_deadline(records: Records, message: str, *, step: int) -> None:
    """Report that this rank is killed because it did not stop in time; `stopping`: the stop was requested."""
    event = FailureEvent(step=step, rank=records.rank, error=message, exit_code=1, traceback="", stopping=True)
    with suppress(EnvironmentFault):
        records.event(event, every_rank=True)


def say(text: str) -> None:
    """Write into the rank's own log."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def lost_a_peer(error: BaseException) -> bool:
    """Return True if the error only says that another rank is gone; that rank reports the cause."""
    gone = re.search(r"Connection (closed|reset) by (peer|remote)", str(error))
    return isinstance(error, RuntimeError) and gone is not None


# Seconds within which the second Ctrl-C that has ended another rank reaches this one.
SECOND_INTERRUPT_SECONDS = 0.5
# A closed terminal requests the same as SIGTERM.
EVENTS = {
    signal.SIGTERM: "sigterm",
    signal.SIGHUP: "sigterm",
    signal.SIGINT: "sigint",
    signal.SIGUSR1: "sigusr1",
}


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask this process to stop; under `nohup` SIGHUP is not one of them."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in EVENTS if not (ignored and number is signal.SIGHUP))


def killed_by(number: int) -> str:
    """Return `killed by SIGKILL`, with the number for signals without names."""
    named = number in {known.value for known in signal.Signals}
    return f"killed by {signal.Signals(number).name if named else f'signal {number}'}"


def end_at_once() -> None:
    """Let signals end this process: before training there is nothing to save, and a rank that waits for a lost rank
    runs no Python handler."""
    for number in stop_signals():
        signal.signal(number, signal.SIG_DFL)


def answer_at_once(answer: Callable[[int], None]) -> None:
    """Call `answer` in a thread with the first signal before training, also while the main thread waits for a lost
    rank. Main thread only."""
    for number in stop_signals():
        signal.signal(number, lambda *_: None)
    read_end = _numbers_of_signals()

    def wait() -> None:
        answer(os.read(read_end, 1)[0])

    threading.Thread(target=wait, name="signals before training", daemon=True).start()


def _numbers_of_signals() -> int:
    """Return a file descriptor with a byte for each signal, also while the main thread waits for another rank. Main
    thread only."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    return read_end


def _leave_on_second_interrupt(read_end: int) -> None:
    interrupts = 0
    while interrupts < 2:
        interrupts += os.read(read_end, 1) == bytes([signal.SIGINT])
    os._exit(EXIT_CODES[EndStatus.INTERRUPTED])  # the second Ctrl-C ends the process immediately


@define
class StopRequests:
    """Stop requests from the signals that this rank has received.

    report: called with the reason if the rank is killed at its deadline. answered: the actions declared for the event
    are done, and the rank only has to exit.
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
        """Start the deadline: the run is to stop because of `event`. Only the first call counts."""
        if self._watchdog is None:
            self._until = time.monotonic() + self.deadline_seconds
            # A rank that hangs in a collective never reaches the boundary, but must not outlive its deadline.
            self._watchdog = threading.Timer(self.deadline_seconds, self._give_up, (event,))
            self._watchdog.daemon = True
            self._watchdog.start()

    def left(self, keep: float = 0.0) -> float:
        """Return the seconds until the deadline, at least 0, minus the share `keep` of the whole time.

        Without a stop: those that a stop would give.
        """
        whole = self.deadline_seconds if self._until is None else self._until - time.monotonic()
        return max(0.0, whole - keep * self.deadline_seconds)

    def rest(self) -> None:
        """Cancel the deadline, because the run has stopped in time."""
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


PATIENCE_SECONDS: Final = 60


def answer_of(*command: str, refused: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> str | None:
    """Return the output of a command; None if it fails with one of the texts `refused`. environment: None for this
    process's own. Raises EnvironmentFault (X461)."""
    said = shlex.join(command)
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=PATIENCE_SECONDS,
            check=False,
            env=environment,
        )
    except FileNotFoundError:
        message = f"the command {command[0]} was not found"
        raise EnvironmentFault("X461", f"{message}; run xtrain where it is installed") from None
    except subprocess.TimeoutExpired as error:
        raise EnvironmentFault("X461", f"`{said}` did not finish within {PATIENCE_SECONDS} s") from error
    except OSError as error:
        raise EnvironmentFault("X461", f"`{said}` cannot be started: {error.strerror}") from error
    if done.returncode == 0:
        return done.stdout
    why = (done.stderr or done.stdout).strip()
    if any(text in why for text in refused):
        return None
    how = f"failed with exit code {done.returncode}" if done.returncode > 0 else f"was {killed_by(-done.returncode)}"
    raise EnvironmentFault("X461", f"`{said}` {how}: {why or 'no output'}")
