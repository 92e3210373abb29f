"""Start of the ranks of one machine, ranks that outlive their group, and the cause of a failure.

A single machine starts its ranks through torch's elastic agent, as torchrun does.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from inspect import signature
from pathlib import Path
from types import FrameType
from typing import Final
from warnings import filterwarnings

from attrs import define, field, frozen

from xtrain.records.events import ControlEvent, FailureEvent, RunEndEvent, SignalEvent, StopEvent, StuckEvent
from xtrain.records.lines import Event
from xtrain.records.names import ControlState, ControlWord, EndStatus
from xtrain.records.training_events import SetupDoneEvent
from xtrain.runtime.base.errors import EXIT_CODES, STATUS_OF_SIGNAL, EnvironmentFault
from xtrain.runtime.base.hosts import LOOPBACK, NodePlace
from xtrain.runtime.base.locks import WORKER_LOCK, hold
from xtrain.runtime.observe.stopping import killed_by, stop_signals
from xtrain.text.units import seconds_text

# Starts in a row that fail without a step of a group, or before the set-up of all ranks: another would fail too.
AT_ONCE: Final = 3
# Seconds before a restart, doubled after each such start: a temporary fault may have passed.
SHORTEST: Final = 1.0
LONGEST: Final = 30.0


@define
class StopNotes:
    """Stop requests to the launcher. `signal` is the first one, None without one."""

    signal: int | None = None
    _came: threading.Event = field(factory=threading.Event)

    def listen(self) -> None:
        """Handle the signals; the elastic agent has its own handlers while it runs. Main thread only."""
        for number in stop_signals():
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal if self.signal is not None else number
        self._came.set()

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds`; return True if a stop was requested."""
        return self._came.wait(seconds)


PATIENCE = 20.0  # seconds: a killed process exits within one, unless a disk holds it
_LOCK_PAUSE = 0.05


def end_leftovers(directory: Path) -> None:
    """Kill the remaining ranks that this process started over `directory`, and wait until they are gone.

    Uses SIGKILL, because a stopped process receives nothing else. Raises EnvironmentFault if one stays, as it does
    while the kernel waits for its disk.
    """
    deadline = time.monotonic() + PATIENCE
    while left := ranks_of(directory, os.getpid()):
        if time.monotonic() > deadline:
            pids = ", ".join(map(str, left))
            raise EnvironmentFault(
                "X707", f"processes of an earlier start do not exit: {pids}; it is not safe to continue"
            )
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_LOCK_PAUSE)
    _wait_for_lock(directory, deadline)


def rank_command(directory: Path, launcher: int) -> list[str]:
    """Return the command with which process `launcher` starts a rank over `directory`; it also identifies the rank
    later."""
    return [sys.executable, "-P", "-m", "xtrain.runtime.loop.worker", str(directory), str(launcher)]


def ranks_of(directory: Path, launcher: int) -> list[int]:
    """Return the ids of live rank processes over `directory` that `launcher` started; none without /proc."""
    ranks, arguments = [], [os.fsencode(argument) for argument in rank_command(directory, launcher)[1:]]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
            if command[1:-1] != arguments:
                continue
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            continue  # it has just ended
        if state not in "ZX":
            ranks.append(int(process.name))
    return ranks


def _wait_for_lock(directory: Path, deadline: float) -> None:
    """Wait for the first rank's lock, which a child process may hold a moment longer than the rank."""
    while True:
        try:
            hold(directory, WORKER_LOCK).close()
        except EnvironmentFault:
            if time.monotonic() > deadline:
                raise
            time.sleep(_LOCK_PAUSE)
        else:
            return


# Spins of an idle thread of a single rank before it sleeps.
SPINS: Final = "10000"


@frozen
class Ended:
    """End of a worker group, as the agent saw it.

    failures: rank → exit code (negative: a signal). signal: received by the launcher itself.
    """

    failures: dict[int, int] = field(factory=dict)
    signal: int | None = None
    at_once: bool = False
    """True if a second Ctrl-C ended the ranks without saving."""
    who: str = "xtrain run"
    when: str = "before the first step"
    """The process that received the signal, and when, if the run had not begun."""

    def causes(self) -> dict[int, str]:
        """Return rank → how it ended; killed ranks first, because they could not report anything."""
        order = sorted(self.failures.items(), key=lambda item: (item[1] >= 0, item[0]))
        return {rank: _reason(code) for rank, code in order}


def launch(directory: Path, attempt: str, *, ranks: int, stop_seconds: float, notes: StopNotes) -> Ended:
    """Run `ranks` workers over the plan in `directory` until all have ended. Main thread only.

    A signal to this process is passed on to every worker, which then has `stop_seconds` to save and exit. notes: stop
    requests from before the start; after one, no worker is started.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The workers' own records, not the agent's log, say how the group ended.
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    logs = directory / "logs" / attempt
    logs.mkdir(parents=True, exist_ok=True)
    options = {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": ranks,
        "run_id": attempt,
        "rdzv_backend": "c10d",
        # By address: the machine's own name may not resolve.
        "rdzv_endpoint": f"{LOOPBACK}:0",
        "local_addr": LOOPBACK,
        "max_restarts": 0,
        "monitor_interval": 0.1,
        "logs_specs": DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL),
        "shutdown_timeout": int(stop_seconds) + 10,
        "signals_to_handle": "SIGQUIT",  # the others are handled here
    }
    known = signature(LaunchConfig).parameters
    config = LaunchConfig(**{name: value for name, value in options.items() if name in known})
    # Idle threads sleep instead of spinning: if another process wants the core, spinning costs tenfold. Threads of a
    # single rank spin for a while first: this halves the step time of a tiny model (docs/performance.md).
    if ranks == 1 and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    command = rank_command(directory, os.getpid())

    asked: list[int] = []
    over: list[bool] = []

    def stop(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if over:
            return  # no rank is left to signal, and nothing to interrupt
        if len(asked) > 1:  # the agent is waiting for its ranks and must not be interrupted
            for rank in ranks_of(directory, os.getpid()):
                with suppress(ProcessLookupError):
                    os.kill(rank, number)
            return
        # The agent passes the signal on to all its ranks.
        raise SignalException("a stop was asked for", sigval=signal.Signals(number))

    try:
        for number in stop_signals():
            signal.signal(number, stop)
        if notes.signal is not None:
            over.append(True)
            return Ended(signal=notes.signal)
        try:
            filterwarnings("ignore", "unclosed file .*std(out|err).log", ResourceWarning)  # torch's logs of ranks
            elastic_launch(config, command[0])(*command[1:])
        finally:
            over.append(True)
    except ChildFailedError as error:
        return Ended(failures={rank: failure.exitcode for rank, failure in error.failures.items()})
    except SignalException as error:
        return Ended(signal=int(error.sigval), at_once=asked.count(signal.SIGINT) > 1)
    return Ended()


def _reason(exit_code: int) -> str:
    if exit_code < 0:
        return killed_by(-exit_code)
    return f"exited with code {exit_code}"


# Set for ranks whose parent is an xtrain launcher; they end with it.
OF_NODE: Final = "XTRAIN_NODE"
# Seconds for other ranks to notice a failed rank, and to record how they end.
AFTER_FAILURE: Final = 30.0
_PAUSE: Final = 0.05
_STOPPED: Final = (EXIT_CODES[EndStatus.STOPPED], EXIT_CODES[EndStatus.INTERRUPTED])


def run_node(place: NodePlace, nodes: int, ranks: int, command: Sequence[str]) -> int:
    """Run `command` once for each rank of this machine; return the exit code of the run here. Main thread only.

    ranks: of each machine. A failed rank ends the others here.
    """
    processes: list[subprocess.Popen[bytes]] = []
    asked: list[int] = []

    def send(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        for process in processes:
            with suppress(ProcessLookupError):
                process.send_signal(number)

    for number in stop_signals():
        signal.signal(number, send)
    places = (_environment(place, nodes, ranks, local) for local in range(ranks))
    processes += (subprocess.Popen(command, env=environment) for environment in places)
    failed_at: float | None = None
    killed: set[int] = set()
    while True:
        codes = [process.poll() for process in processes]
        _report_killed(codes, asked, place.index * ranks, killed)
        if None not in codes:
            return exit_code_of_all([process.returncode for process in processes], asked)
        if failed_at is None and any(_has_failed(code, asked) for code in codes):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > AFTER_FAILURE:
            killed |= {local for local, code in enumerate(codes) if code is None}
            for process in processes:
                process.kill()
        time.sleep(_PAUSE)


def _report_killed(codes: Sequence[int | None], asked: Sequence[int], first: int, told: set[int]) -> None:
    """Report each rank that was killed from outside, for example by the kernel when memory is short, once: it could not
    report this itself.

    first: the first rank of this machine. told: local ranks that need no more reports.
    """
    for local, code in enumerate(codes):
        if code is not None and code < 0 and -code not in asked and local not in told:
            told.add(local)
            print(f"xtrain run: rank {first + local} was {killed_by(-code)}", file=sys.stderr, flush=True)


def exit_code_of_all(codes: Sequence[int], asked: Sequence[int]) -> int:
    """Return the exit code of the machine: of a failed rank, else of a stopped one, else 0. A rank killed by a signal
    has failed, but an exit code of another rank takes precedence. asked: signals that this process passed on, which
    also end ranks that are starting."""
    failed = [code for code in codes if _has_failed(code, asked)]
    if failed:
        return next((code for code in failed if code > 0), EXIT_CODES[EndStatus.FAILED])
    return next((EXIT_CODES[STATUS_OF_SIGNAL[-code]] if code < 0 else code for code in codes if code), 0)


def _has_failed(code: int | None, asked: Sequence[int]) -> bool:
    return code is not None and code != 0 and code not in _STOPPED and -code not in asked


def _environment(place: NodePlace, nodes: int, ranks: int, local: int) -> dict[str, str]:
    return {
        **os.environ,
        OF_NODE: str(place.index),
        "RANK": str(place.index * ranks + local),
        "WORLD_SIZE": str(nodes * ranks),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": place.host,
        "MASTER_PORT": str(place.port),
    }


@frozen(kw_only=True)
class FailureCause:
    """Cause of a worker group's failure.

    reason: one line. ranks: where it began, as far as known. again: ranks have not agreed on the failure, so a restart
    may get further. begun: set-up was done.
    """

    reason: str
    ranks: tuple[int, ...]
    again: bool
    begun: bool


def find_failure_cause(said: list[Event], ended: Ended) -> FailureCause | None:
    """Return the cause from the events of a worker group and the ends of its processes; None if the ranks ended the
    run."""
    if any(isinstance(event, RunEndEvent) for event in said):
        return None
    failures = failures_in(said)
    final = ended.signal is not None or any(failure.exit_code == 3 or failure.agreed for failure in failures)
    final = final or EXIT_CODES[EndStatus.ENVIRONMENT] in ended.failures.values()
    final = final or stopped_early(said, ended) is not None or _was_to_stop(said)
    reason, ranks = _first_cause(said, failures, ended)
    begun = any(isinstance(event, SetupDoneEvent) for event in said)
    return FailureCause(reason=reason, ranks=ranks, again=not final, begun=begun)


def _was_to_stop(said: list[Event]) -> bool:
    """Return True if all ranks had agreed to stop: then no restart is wanted."""
    return any(
        isinstance(event, SignalEvent | StopEvent)
        or (isinstance(event, FailureEvent) and event.stopping)
        or (
            isinstance(event, ControlEvent)
            and event.command == ControlWord.STOP
            and event.state != ControlState.REFUSED
        )
        for event in said
    )


def failures_in(said: list[Event]) -> list[FailureEvent]:
    return [event for event in said if isinstance(event, FailureEvent)]


def exit_code_of(said: list[Event]) -> int:
    """Return the exit code of the end that ranks recorded."""
    return next(event.exit_code or 0 for event in reversed(said) if isinstance(event, RunEndEvent))


def stopped_early(said: list[Event], ended: Ended) -> str | None:
    """Return the run's end status if signals stopped the ranks before there was anything to save, else None."""
    signals = {-code for code in ended.failures.values() if code < 0}
    failures = failures_in(said)
    own = [failure for failure in failures if not failure.lost]
    reported = {failure.rank for failure in failures}
    left = [rank for rank, code in ended.failures.items() if code > 0 and rank not in reported]
    # A rank that left by itself is the reason why the agent sent SIGTERM to the others.
    if own or left or not signals or not signals <= STATUS_OF_SIGNAL.keys():
        return None
    if any(isinstance(event, SetupDoneEvent | StuckEvent) for event in said):
        return None
    return EndStatus.INTERRUPTED if signal.SIGINT in signals else EndStatus.STOPPED


def _first_cause(said: list[Event], failures: list[FailureEvent], ended: Ended) -> tuple[str, tuple[int, ...]]:
    """Return the first cause: stuck ranks, else killed ranks, else ranks that raised, else ranks that exited.

    The agent sends SIGTERM to all others once a rank has ended.
    """
    stuck = next((event for event in said if isinstance(event, StuckEvent)), None)
    if stuck is not None and stuck.ranks:
        ranks = tuple(stuck.ranks)
        where = f" in {stuck.node}" if stuck.node else ""
        return f"{_names(ranks)} made no progress{where} for {seconds_text(stuck.seconds or 0.0)}", ranks
    ends = ended.causes()
    ended_by = {rank: -code for rank, code in ended.failures.items() if code < 0}
    killed = {rank: ends[rank] for rank, number in ended_by.items() if number != signal.SIGTERM}
    if killed:
        return _each(killed), tuple(sorted(killed))
    raised = [(failure.rank, failure.error) for failure in failures if not failure.lost]
    own = {rank: f"failed: {_first_line(error)}" for rank, error in raised if rank is not None}
    if own:
        return _each(own), tuple(sorted(own))
    left = {rank: ends[rank] for rank in ends if rank not in ended_by and rank not in {e.rank for e in failures}}
    if not left:
        left = {rank: ends[rank] for rank in ended_by}
    if left:
        return _each(left), tuple(sorted(left))
    if failures:
        return _first_line(failures[0].error), ()
    return "the ranks exited without reporting a reason", ()


def _each(reasons: dict[int, str]) -> str:
    """Join reasons as `rank 1 was killed by SIGKILL`; ranks with the same reason together."""
    ranks_of: dict[str, list[int]] = {}
    for rank, reason in sorted(reasons.items()):
        ranks_of.setdefault(reason, []).append(rank)
    parts = []
    for reason, ranks in ranks_of.items():
        verb = ("was " if len(ranks) == 1 else "were ") if reason.startswith("killed") else ""
        parts.append(f"{_names(tuple(ranks))} {verb}{reason}")
    return "; ".join(parts)


def _names(ranks: tuple[int, ...]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"ranks {shown}"


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
