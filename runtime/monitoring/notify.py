"""Commands of the user's own, run beside training by the first rank; nothing of them can harm the run."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any, Final

from attrs import define, field, frozen

from xtrain.dsl.env_text import filled
from xtrain.records.run_events import NotifyEvent
from xtrain.runtime.monitoring.detectors import Finding
from xtrain.runtime.reporting.records import Records
from xtrain.runtime.state import Progress

# Seconds between two starts of a command for the same kind of alert.
PAUSE_SECONDS: Final = 60.0
# Seconds that a command gets to leave, once it was asked to.
GRACE_SECONDS: Final = 5.0
# Seconds that a run waits for commands at its end: for longer than their limit.
CLOSE_SECONDS: Final = 45.0
# Seconds that they get to leave, where the run has to.
LEAVE_SECONDS: Final = 0.5
# What makes a process a rank: a command that trains or tests something must not take itself for one.
OF_RANKS: Final = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "XTRAIN_BEGAN", "XTRAIN_RESTART", "XTRAIN_FIRST_STEP",
)  # fmt: skip
OF_LAUNCHERS: Final = ("TORCHELASTIC_", "PET_")


@frozen(kw_only=True)
class Message:
    """What a command is told."""

    kind: str
    text: str
    step: int
    value: float | None = None
    limit: float | None = None
    ranks: tuple[int, ...] = ()


@define(eq=False)
class Notifier:
    """Runs commands, each in a thread that waits for it. total: the steps of the run, None where they are not known.
    hidden: variables whose `env(NAME)` in a command stands for the value."""

    records: Records
    progress: Progress
    total: int | None
    environment: Mapping[str, str] = field(factory=lambda: dict(os.environ))
    hidden: frozenset[str] = frozenset()
    _lock: threading.Lock = field(factory=threading.Lock)
    _running: dict[tuple[str, str], threading.Thread] = field(factory=dict)
    _processes: dict[tuple[str, str], subprocess.Popen] = field(factory=dict)
    _over: bool = False
    _begun: dict[tuple[str, str], float] = field(factory=dict)
    _left_out: dict[tuple[str, str], int] = field(factory=dict)

    def alert(self, commands: list[tuple[str, float]], finding: Finding, step: int) -> None:
        """An alert was raised: run its commands, but for those that run still or have run a moment ago."""
        for command, seconds in commands:
            message = Message(
                kind=finding.kind,
                text=finding.message,
                step=step,
                value=finding.value,
                limit=finding.limit,
                ranks=finding.ranks,
            )
            self.start(command, seconds, message, pause=PAUSE_SECONDS)

    def trigger(self, kind: str, command: str, seconds: float, loss: float) -> None:
        """Something else has happened: the run has come to a step, is to stop, or has ended."""
        step, known = self.progress.step, isfinite(loss)
        of = "" if self.total is None else f" of {self.total:,}"
        at = f"after step {step:,}{of}" + (f", loss {loss:.4g}" if known else "")
        text = {"finish": f"the run has finished {at}", "tick": f"the run continues {at}"}
        stops = f"{kind}: the run stops {at}"
        if kind == "nan":
            stops = f"{self.progress.bad.in_a_row} steps in a row with a non-finite loss or gradient norm, {at}"
        message = Message(kind=kind, text=text.get(kind, stops), step=step, value=loss if known else None)
        self.start(command, seconds, message, pause=0.0)

    def start(self, command: str, seconds: float, message: Message, *, pause: float) -> None:
        """Run a command without waiting for it, unless it runs for the same thing already. Never raises."""
        key = (message.kind, command)
        with self._lock:
            before = self._begun.get(key)
            if key in self._running or (before is not None and time.monotonic() - before < pause):
                self._left_out[key] = self._left_out.get(key, 0) + 1
                return
            left_out = self._left_out.pop(key, 0)
            thread = threading.Thread(
                target=self._run, args=(key, command, seconds, message, left_out), name="notify", daemon=True
            )
            self._running[key], self._begun[key] = thread, time.monotonic()
            try:
                thread.start()
            except RuntimeError:  # the machine gives no thread
                del self._running[key]

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Wait at most so many seconds for the commands that run, each of which has a limit, then end them; not for a
        disk that takes no record of them."""
        self._await(min(seconds, CLOSE_SECONDS))
        with self._lock:
            self._over = bool(self._running)
            left = [process for process in self._processes.values() if process.returncode is None]
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in left:
                _signal(process, number)
            self._await(LEAVE_SECONDS)

    def _await(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        for thread in tuple(self._running.values()):
            thread.join(max(0.0, until - time.monotonic()))

    def _run(self, key: tuple[str, str], command: str, seconds: float, message: Message, left_out: int) -> None:
        begun = time.monotonic()
        try:
            code, detail = self._wait(key, command, seconds, message)
        except (OSError, ValueError) as error:  # no shell, no process, or text that no environment can hold
            code, detail = None, f"could not be run: {error}"
        took = time.monotonic() - begun
        if left_out:
            detail += f"; {left_out} before it came too soon and were skipped"
        event = NotifyEvent(
            step=message.step, kind=message.kind, command=command, exit_code=code, seconds=took, detail=detail
        )
        with suppress(Exception):  # a disk that takes no record is told of elsewhere
            self.records.event(event, every_rank=True)
            if code != 0:
                text = f"notify on {message.kind}: `{command}` {detail}; its output is in logs/notify.log"
                self.records.warn(text, step=message.step, every_rank=True)
        with self._lock:
            self._running.pop(key, None)
            self._processes.pop(key, None)

    def _wait(self, key: tuple[str, str], command: str, seconds: float, message: Message) -> tuple[int | None, str]:
        """(exit code, None if it was ended; what became of it)."""
        with self._log() as log:
            head = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message.kind}, step {message.step}: {command}\n"
            with suppress(OSError):
                os.write(log.fileno(), head.encode(errors="backslashreplace"))
            process = subprocess.Popen(
                ["/bin/sh", "-c", filled(command, self.hidden, self.environment)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._variables(message),
                start_new_session=True,
            )
        with self._lock:
            self._processes[key] = process
            over = self._over
        if over:
            _signal(process, signal.SIGKILL)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            _end(process)
            return None, f"was killed after {seconds:g} s"
        if self._over and code < 0:
            return None, "was ended with the run"
        return code, "has ended" if code == 0 else f"has ended with exit code {code}"

    def _log(self) -> Any:
        path = self.records.directory / "logs" / "notify.log"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return path.open("ab", buffering=0)
        except OSError:
            return Path(os.devnull).open("wb")

    def _variables(self, message: Message) -> dict[str, str]:
        """The environment of the run as it was given, without what made this process a rank."""
        inherited = {
            name: value
            for name, value in self.environment.items()
            if name not in OF_RANKS and not name.startswith(OF_LAUNCHERS)
        }
        own = {
            "ALERT": message.kind,
            "MESSAGE": message.text,
            "RUN": self.records.directory.name,
            "DIRECTORY": str(self.records.directory.absolute()),
            "STEP": str(message.step),
            "VALUE": "" if message.value is None else repr(message.value),
            "LIMIT": "" if message.limit is None else repr(message.limit),
            "RANKS": " ".join(map(str, message.ranks)),
        }
        return inherited | {f"XTRAIN_{name}": value.replace("\0", "") for name, value in own.items()}


def _end(process: subprocess.Popen) -> None:
    """End a command and all that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        _signal(process, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)


def _signal(process: subprocess.Popen, number: int) -> None:
    """Send a signal to a command and all that it has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
