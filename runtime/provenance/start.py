"""What a rank knows of the start it belongs to: who started it, whether the start follows one that failed."""

import os
import socket
from contextlib import suppress
from pathlib import Path

# Tells the ranks how often they have been started again, and a command how often its job has started before. What
# torch's agent says of that, another machine's may contradict.
RESTART = "XTRAIN_RESTART"
# When the command began, in seconds since 1970: `launch.time_limit` counts from there.
BEGAN = "XTRAIN_BEGAN"


# Tells them with which step this start began, before any restart: `launch.stop_after` counts from there.
FIRST_STEP = "XTRAIN_FIRST_STEP"


def starts_before() -> int:
    """How many starts of the same run by the same launcher or job came before this one."""
    return int(os.environ.get(RESTART) or 0)


def is_restart() -> bool:
    """Whether this start follows one that failed, or was stopped with its job, by whoever starts the ranks."""
    return starts_before() > 0


def first_step(step: int) -> int:
    """The step with which this start began, of a worker group that begins with `step`."""
    recorded = os.environ.get(FIRST_STEP)
    return min(int(recorded), step) if recorded is not None and is_restart() else step


def launcher_id() -> str | None:
    """The process that has started this rank, as no other one is called; None for a rank of `xtrain run`."""
    if not is_worker():
        return None
    began = ""
    with suppress(OSError, IndexError):
        began = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{socket.gethostname()}:{os.getppid()}:{began}"


def is_worker() -> bool:
    """Whether another launcher (torchrun, Slurm) has made this process a rank."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()
