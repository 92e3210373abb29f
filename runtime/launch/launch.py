"""Starts the ranks of this machine through torch's elastic agent (what torchrun is) and waits for them."""

import logging
import os
import signal
from contextlib import suppress
from inspect import signature
from pathlib import Path
from types import FrameType
from typing import Final
from warnings import filterwarnings

from attrs import field, frozen

from xtrain.runtime.control.signals import killed_by, stop_signals
from xtrain.runtime.launch.node_place import LOOPBACK
from xtrain.runtime.launch.stop_notes import StopNotes

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

    from xtrain.runtime.launch.leftovers import rank_command, ranks_of  # which need what asks whether this is a restart

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
