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
    """Execute the plan as the rank that the environment names; returns how it ended.

    exit_process: ends the process, from any thread, where the run is given up while this rank hangs. store: in which
    the ranks have met. answered: signals that come before training are seen to; else they end the process.
    """
    from xtrain.runtime.loop.executor import Executor
    from xtrain.runtime.observe.records import Records
    from xtrain.runtime.observe.stopping import report_failure

    if not answered:
        end_at_once()
    group = group_of_rank(plan)
    rank = int(os.environ.get("RANK", "0")) + (0 if group is None else group.first)
    try:
        # Of several replica groups none is there all the time: who starts them has the lock.
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
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # a log, whatever the locale of the machine
    directory, launcher = Path(sys.argv[1]), int(sys.argv[2])
    die_with_launcher(launcher)
    plan = plan_in(directory)
    status = run_rank(plan, directory)
    # The launcher reads how a run ended from its events: for the elastic agent, stopping on request is no failure.
    # Of a rank whose disk took no event it has the exit code alone.
    exit_process(EXIT_CODES[status] if status in (EndStatus.FAILED, EndStatus.ENVIRONMENT) else 0)


if __name__ == "__main__":
    main()
