"""What a rank knows of the start it belongs to: who started it, whether the start follows one that failed."""

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Final

from xtrain.planner.units import plural
from xtrain.runtime.errors import EnvironmentFault

# Tells the ranks how often they have been started again, and a command how often its job has started before. What
# torch's agent says of that, another machine's may contradict.
RESTART = "XTRAIN_RESTART"
# When the command began, by the monotonic clock of this machine: `launch.time_limit` counts from there.
BEGAN = "XTRAIN_BEGAN"
# By which another launcher makes a process a rank.
RANK_VARIABLES: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
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
        began = Path(f"/proc/{os.getppid()}/stat").read_bytes().rpartition(b")")[2].split()[19].decode()
    return f"{socket.gethostname()}:{os.getppid()}:{began}"


def is_worker() -> bool:
    """Whether another launcher (torchrun, Slurm) has made this process a rank."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


def rank_variables() -> str:
    """Return the variables of the environment that make this process a rank, with their values."""
    found = [f"{name}={os.environ[name]}" for name in RANK_VARIABLES if name in os.environ]
    return f"{', '.join(found[:-1])} and {found[-1]}"


def check_rank_variables() -> None:
    """Raise EnvironmentFault if the numbers that another launcher has given this process are no rank of a world."""
    rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
    optional = [os.environ.get(name, "0") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    if all(text.isdecimal() for text in (rank, world, *optional)) and int(rank) < int(world):
        return
    local = "".join(f", {name}={os.environ[name]}" for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE") if name in os.environ)
    message = f"the environment names no rank: RANK={rank}, WORLD_SIZE={world}{local}; RANK counts from 0 to WORLD_SIZE"
    raise EnvironmentFault("X703", f"{message} - 1; correct the variables, or unset them to start a run here")


def note_of_rank() -> str:
    """Return who this process is, and whom it waits for, by variables that may be left over; empty if a launcher has
    set LOCAL_RANK as well, as all launchers do that start the ranks of a machine."""
    if "LOCAL_RANK" in os.environ:
        return ""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place = f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT', '(no MASTER_PORT)')}"
    waits = f"it waits for rank 0 at {place}" if rank else f"it waits for {plural(world - 1, 'other rank')} at {place}"
    return (
        f"this process is rank {rank} of {world}, by {rank_variables()} in the environment"
        f"{'; ' + waits if world > 1 else ''}; if no launcher has set these variables, unset them"
    )
