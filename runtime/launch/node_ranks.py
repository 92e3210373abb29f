"""The ranks of one machine of several: started, told of signals, and waited for.

Each is `xtrain run` as a rank, as under torchrun; the first rank of all keeps the store in which they meet. Nothing is
started again here: machines that count failures each for itself would not agree on it. Whoever has started the machines
does that, when the command has ended on all of them.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Final

from xtrain.records.end_status import EndStatus
from xtrain.runtime.control.signals import killed_by, stop_signals
from xtrain.runtime.launch.node_place import NodePlace
from xtrain.runtime.outcome import EXIT_CODES, STATUS_OF_SIGNAL

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
