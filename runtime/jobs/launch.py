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


@define
class StopNotes:
    """`signal` is the first stop request that came, None for none."""

    signal: int | None = None
    _came: threading.Event = field(factory=threading.Event)

    def listen(self) -> None:
        """Take over the signals; the elastic agent has its own handlers while it runs. Main thread only."""
        for number in stop_signals():
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal if self.signal is not None else number
        self._came.set()

    def wait(self, seconds: float) -> bool:
        """Whether a stop was asked for within so many seconds."""
        return self._came.wait(seconds)


PATIENCE = 20.0  # seconds: a killed process leaves within one, unless a disk holds it
_LOCK_PAUSE = 0.05


def end_leftovers(directory: Path) -> None:
    """Kill what is left of the ranks that this process has started over `directory`, and wait until they are gone.

    SIGKILL, as a stopped process hears nothing else. Raises EnvironmentFault if one stays, as it does while the kernel
    waits for its disk.
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
    """How a process `launcher` starts a rank over `directory`. By these words the rank is found again."""
    return [sys.executable, "-P", "-m", "xtrain.runtime.loop.worker", str(directory), str(launcher)]


def ranks_of(directory: Path, launcher: int) -> list[int]:
    """Process ids of ranks over `directory` that `launcher` has started and that are alive; none without /proc."""
    found, arguments = [], [os.fsencode(each) for each in rank_command(directory, launcher)[1:]]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
            if command[1:-1] != arguments:
                continue
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            continue  # it has just ended
        if state not in "ZX":
            found.append(int(process.name))
    return found


def _wait_for_lock(directory: Path, deadline: float) -> None:
    """The first rank's lock goes with its last file descriptor, which a child of it may hold a moment longer."""
    while True:
        try:
            hold(directory, WORKER_LOCK).close()
        except EnvironmentFault:
            if time.monotonic() > deadline:
                raise
            time.sleep(_LOCK_PAUSE)
        else:
            return


# Turns in which an idle thread of a rank that is alone waits before it sleeps.
SPINS: Final = "10000"


@frozen
class Ended:
    """How the worker group ended, as the agent saw it.

    Ranks that failed, by exit code (negative: a signal), and the signal that the launcher itself received.
    """

    failures: dict[int, int] = field(factory=dict)
    signal: int | None = None
    at_once: bool = False
    """Whether a second Ctrl-C has ended the ranks without saving."""
    who: str = "xtrain run"
    when: str = "before the first step"
    """Which process received the signal, and when, if the run had not begun."""

    def causes(self) -> dict[int, str]:
        """Rank → how it ended, those that were killed first: they had no chance to say anything themselves."""
        order = sorted(self.failures.items(), key=lambda item: (item[1] >= 0, item[0]))
        return {rank: _reason(code) for rank, code in order}


def launch(directory: Path, attempt: str, *, ranks: int, stop_seconds: float, notes: StopNotes) -> Ended:
    """Run `ranks` workers over the plan in `directory`; returns when all have ended. Main thread only.

    A signal to this process goes on to every worker, which then has `stop_seconds` to save and leave. notes: what has
    come before there are workers; after such a signal none is started.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # REGROUP  # which need what asks whether this is a restart

    # How the worker group ends is read from its own records, not from the agent's log.
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
        # By address: the machine's own name need not resolve.
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
    # Idle threads sleep instead of spinning: where another process wants the core, spinning costs tenfold. Those of a
    # rank that is alone wait a while for the next operation first: a step of a tiny model takes half the time then
    # (docs/performance.md).
    if ranks == 1 and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    command = rank_command(directory, os.getpid())

    asked: list[int] = []
    over: list[bool] = []

    def stop(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if over:
            return  # there is nobody left to be told, and nothing to be torn out of
        if len(asked) > 1:  # the agent waits for its ranks to leave, and is not to be torn out of that
            for rank in ranks_of(directory, os.getpid()):
                with suppress(ProcessLookupError):
                    os.kill(rank, number)
            return
        # Wherever this comes, the agent sends it on to all ranks it has.
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


# Says to a rank that its parent is a launcher of xtrain, with which it ends.
OF_NODE: Final = "XTRAIN_NODE"
# Seconds that other ranks have to notice a rank that has failed, and to write down how they end.
AFTER_FAILURE: Final = 30.0
_PAUSE: Final = 0.05
_STOPPED: Final = (EXIT_CODES[EndStatus.STOPPED], EXIT_CODES[EndStatus.INTERRUPTED])


def run_node(place: NodePlace, nodes: int, ranks: int, command: Sequence[str]) -> int:
    """Run `command` once for each rank of this machine; the exit code of the run here. Main thread only.

    ranks: of each machine. A rank that fails takes the others here along.
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
    processes += (subprocess.Popen(command, env=each) for each in places)
    failed_at: float | None = None
    killed: set[int] = set()
    while True:
        codes = [process.poll() for process in processes]
        _tell_of_killed(codes, asked, place.index * ranks, killed)
        if None not in codes:
            return exit_code_of_all([process.returncode for process in processes], asked)
        if failed_at is None and any(_has_failed(code, asked) for code in codes):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > AFTER_FAILURE:
            killed |= {local for local, code in enumerate(codes) if code is None}
            for process in processes:
                process.kill()
        time.sleep(_PAUSE)


def _tell_of_killed(codes: Sequence[int | None], asked: Sequence[int], first: int, told: set[int]) -> None:
    """Say once which ranks somebody else has killed, as the kernel does where memory is short: they could not say it.

    first: the first rank of this machine. told: of this machine, those of which nothing is to be said any more.
    """
    for local, code in enumerate(codes):
        if code is not None and code < 0 and -code not in asked and local not in told:
            told.add(local)
            print(f"xtrain run: rank {first + local} was {killed_by(-code)}", file=sys.stderr, flush=True)


def exit_code_of_all(codes: Sequence[int], asked: Sequence[int]) -> int:
    """That of the whole machine: of a rank that failed, else of one that was stopped, else 0. A rank that a signal has
    killed failed; one that failed by itself says more. asked: the signals that this process has passed on, with which
    ranks end that are only starting."""
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
    """A worker group that has not come to its end.

    reason: one line. ranks: those it began with, as far as that is known. again: it is nothing that all ranks have
    agreed on, so that a restart may get further. begun: its set-up was done.
    """

    reason: str
    ranks: tuple[int, ...]
    again: bool
    begun: bool


def find_failure_cause(said: list[Event], ended: Ended) -> FailureCause | None:
    """The cause, by the events of a worker group and how its processes ended; None if ranks have ended the run."""
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
    """Whether all ranks had agreed to stop: whoever asked for that does not want a restart."""
    return any(
        isinstance(event, SignalEvent | StopEvent)
        or (isinstance(event, FailureEvent) and event.stopping)
        or (isinstance(event, ControlEvent) and _stops(event))
        for event in said
    )


def _stops(event: ControlEvent) -> bool:
    return event.command == ControlWord.STOP and event.state != ControlState.REFUSED


def failures_in(said: list[Event]) -> list[FailureEvent]:
    return [event for event in said if isinstance(event, FailureEvent)]


def exit_code_of(said: list[Event]) -> int:
    """That of the end that ranks have written."""
    return next(event.exit_code or 0 for event in reversed(said) if isinstance(event, RunEndEvent))


def stopped_early(said: list[Event], ended: Ended) -> str | None:
    """How the run ends if ranks were asked to stop by signals of their own before there was anything to save."""
    signals = {-code for code in ended.failures.values() if code < 0}
    failures = failures_in(said)
    own = [failure for failure in failures if not failure.lost]
    reported = {failure.rank for failure in failures}
    left = [rank for rank, code in ended.failures.items() if code > 0 and rank not in reported]
    # Who left by itself is the reason why the agent has sent SIGTERM to the others.
    if own or left or not signals or not signals <= STATUS_OF_SIGNAL.keys():
        return None
    if any(isinstance(event, SetupDoneEvent | StuckEvent) for event in said):
        return None
    return EndStatus.INTERRUPTED if signal.SIGINT in signals else EndStatus.STOPPED


def _first_cause(said: list[Event], failures: list[FailureEvent], ended: Ended) -> tuple[str, tuple[int, ...]]:
    """What came first: ranks that stood still, those that were killed, those that raised, those that merely left.

    SIGTERM is what the agent sends to all others once a rank has ended.
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
    """`rank 1 was killed by SIGKILL`; ranks with the same reason together."""
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
