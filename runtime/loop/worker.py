"""Process of one rank: `python -m xtrain.runtime.loop.worker RUN_DIRECTORY LAUNCHER_PID`, started by the launcher."""

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from xtrain.plan.plan import Plan
from xtrain.records.names import EndStatus
from xtrain.runtime.base.errors import EXIT_CODES, EnvironmentFault, exit_process
from xtrain.runtime.base.locks import WORKER_LOCK, hold
from xtrain.runtime.base.process import die_with_launcher, group_of_rank
from xtrain.runtime.observe.provenance import plan_in
from xtrain.runtime.observe.stopping import end_at_once

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


def run_rank(
    plan: Plan,
    directory: Path,
    exit_process: Callable[[int], None] = exit_process,
    *,
    store: "Store | None" = None,
    answered: bool = False,
) -> str:
    """Execute the plan as the rank that the environment names; return the end status.

    exit_process: ends the process from any thread if the run is given up while this rank hangs. store: where the ranks
    have met. answered: the caller handles signals before training; else they end the process.
    """
    from xtrain.runtime.loop.executor import Executor
    from xtrain.runtime.observe.records import Records
    from xtrain.runtime.observe.stopping import report_failure

    if not answered:
        end_at_once()
    group = group_of_rank(plan)
    rank = int(os.environ.get("RANK", "0")) + (0 if group is None else group.first)
    try:
        # No replica group is always present: their launcher holds the lock.
        lock = hold(directory, WORKER_LOCK) if rank == 0 and group is None else None
    except EnvironmentFault as fault:
        exit_code = EXIT_CODES[EndStatus.ENVIRONMENT]
        report_failure(Records.open(directory, rank), fault, step=0, place="", exit_code=exit_code, trace=False)
        return EndStatus.ENVIRONMENT
    try:
        return Executor(plan, directory, rank=rank, group=group, exit_process=exit_process, store=store).run()
    finally:
        if lock is not None:
            lock.close()


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # a log, whatever the locale
    directory, launcher = Path(sys.argv[1]), int(sys.argv[2])
    die_with_launcher(launcher)
    plan = plan_in(directory)
    status = run_rank(plan, directory)
    # The launcher reads from the events how a run ended: for the elastic agent, stopping on request is no failure. If
    # the disk takes no event, it has only the exit code.
    exit_process(EXIT_CODES[status] if status in (EndStatus.FAILED, EndStatus.ENVIRONMENT) else 0)


if __name__ == "__main__":
    main()
