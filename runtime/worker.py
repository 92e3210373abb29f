"""The process of one rank: `python -m xtrain.runtime.worker RUN_DIRECTORY LAUNCHER_PID`, started by the launcher."""

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..planner.plan import Plan
from ..planner.serialise import from_json
from .control.signals import end_at_once
from .locks import WORKER_LOCK, hold
from .outcome import EXIT_CODES


def leave(code: int) -> None:
    """End this process without tearing the interpreter down: torch's teardown aborts about once in a hundred runs."""
    with suppress(OSError):  # a full disk takes none of it, and is no reason to stay
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def run_rank(plan: Plan, directory: Path, leave: Callable[[int], None] = leave) -> str:
    """Execute the plan as the rank that the environment names; returns how it ended.

    leave: ends the process, from any thread, where the run is given up while this rank hangs.
    """
    from .executor import Executor

    end_at_once()
    rank = int(os.environ.get("RANK", "0"))
    lock = hold(directory, WORKER_LOCK) if rank == 0 else None
    try:
        return Executor(plan, directory, rank=rank, leave=leave).run()
    finally:
        if lock is not None:
            lock.close()


def die_with_launcher(launcher: int) -> None:
    """Ask the kernel for a SIGTERM when the launcher dies, so that no rank outlives it (Linux; elsewhere nothing)."""
    PR_SET_PDEATHSIG = 1
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != launcher:
            leave(1)  # it died before the kernel was asked


def main() -> None:
    directory, launcher = Path(sys.argv[1]), int(sys.argv[2])
    die_with_launcher(launcher)
    plan = from_json(json.loads((directory / "plan.json").read_text()))
    status = run_rank(plan, directory)
    # The launcher reads how a run ended from its events: for the elastic agent, stopping on request is no failure.
    # Of a rank whose disk took no event it has the exit code alone.
    leave(EXIT_CODES[status] if status in ("failed", "environment") else 0)


if __name__ == "__main__":
    main()
