"""Process of a run: its launcher, its start, its replica group, and the cause of its failure.

Under torchrun the cause is left in a file that torchrun shows below its own traceback. A replica group has a process
group of its own, which may end and be restarted while other groups train.
"""

import ctypes
import gc
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from attrs import define, evolve

from xtrain.plan.graph import groups_node
from xtrain.plan.mesh import mesh_of_group
from xtrain.plan.plan import Plan
from xtrain.runtime.base.errors import EnvironmentFault, exit_process
from xtrain.text.units import plural

# Set for a rank if others continue without it when its launcher dies.
OTHERS_GO_ON: Final = "XTRAIN_OTHERS_GO_ON"


def die_with_launcher(launcher: int) -> None:
    """Ask the kernel for a SIGTERM when the launcher dies, so that no rank outlives it (Linux only).

    If others continue without this process, it is a SIGKILL: they are not told of a stop.
    """
    PR_SET_PDEATHSIG = 1
    number = signal.SIGKILL if OTHERS_GO_ON in os.environ else signal.SIGTERM
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != launcher:
            exit_process(1)  # the launcher died before the kernel was asked


@contextmanager
def collected_garbage(steps: int | None) -> Iterator[Callable[[int], None]]:
    """Collect garbage only after every `steps` steps inside the block; None: whenever Python does.

    Yields the function to call after each step, with its number. Objects that exist before are never looked at again.
    """
    if steps is None or not gc.isenabled():
        yield lambda step: None
        return
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield lambda step: _collect() if step % steps == 0 else None
    finally:
        gc.unfreeze()
        gc.enable()


def _collect() -> None:
    gc.collect(1)  # of objects that are new since the last time


FILE: Final = "TORCHELASTIC_ERROR_FILE"
# Seconds by which the first rank may report the cause later than the others.
LATER: Final = 10


def write_cause(text: str, *, of_first: bool = False) -> None:
    """Write the cause of a failure to the file that the launcher reads, if there is one.

    of_first: this rank only refers to the first rank's cause. Of several files torchrun shows the earliest last.
    """
    path = os.environ.get(FILE)
    if not path:
        return
    at = int(time.time()) + (LATER if of_first else 0)
    text = "see the message of the first rank" if of_first else text
    said = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(at)}}
    with suppress(OSError):
        Path(path).write_text(json.dumps({"message": said}), encoding="utf-8")


# Number of restarts of the ranks, and of a command the number of earlier starts of its job. torch's agent has a count
# too, which may differ between machines.
RESTART = "XTRAIN_RESTART"
# Start of the command by this machine's monotonic clock: `launch.time_limit` counts from there.
BEGAN = "XTRAIN_BEGAN"
# Variables by which another launcher makes a process a rank.
RANK_VARIABLES: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# First step of this start, before any restart: `launch.stop_after` counts from there.
FIRST_STEP = "XTRAIN_FIRST_STEP"


def starts_before() -> int:
    """Return the number of earlier starts of the same run by the same launcher or job."""
    return int(os.environ.get(RESTART) or 0)


def is_restart() -> bool:
    """Return True if the ranks were started before, and failed or were stopped with their job."""
    return starts_before() > 0


def first_step(step: int) -> int:
    """Return the first step of this start; `step` is the first step of this worker group."""
    recorded = os.environ.get(FIRST_STEP)
    return min(int(recorded), step) if recorded is not None and is_restart() else step


def launcher_id() -> str | None:
    """Return a unique name of the process that started this rank; None for a rank of `xtrain run`."""
    if not is_worker():
        return None
    began = ""
    with suppress(OSError, IndexError):
        began = Path(f"/proc/{os.getppid()}/stat").read_bytes().rpartition(b")")[2].split()[19].decode()
    return f"{socket.gethostname()}:{os.getppid()}:{began}"


def is_worker() -> bool:
    """Return True if another launcher (torchrun, Slurm) made this process a rank."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


def rank_variables() -> str:
    """Return the environment variables that make this process a rank, with their values."""
    *variables, last = [f"{name}={os.environ[name]}" for name in RANK_VARIABLES if name in os.environ]
    return f"{', '.join(variables)} and {last}" if variables else last


def check_rank_variables() -> None:
    """Raise EnvironmentFault if RANK, WORLD_SIZE or MASTER_PORT of another launcher are invalid."""
    port = os.environ.get("MASTER_PORT", "1")
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        raise EnvironmentFault("X703", f"invalid MASTER_PORT={port} in the environment: a port is 1 to 65535")
    rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
    optional = [os.environ.get(name, "0") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    if all(text.isdecimal() for text in (rank, world, *optional)) and int(rank) < int(world):
        return
    local = "".join(f", {name}={os.environ[name]}" for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE") if name in os.environ)
    message = f"invalid rank in the environment: RANK={rank}, WORLD_SIZE={world}{local}; RANK must be 0 to WORLD_SIZE"
    raise EnvironmentFault("X703", f"{message} - 1; correct the variables, or unset them to start a run here")


def note_of_rank() -> str:
    """Return which rank this process is and whom it waits for, as its environment variables may be left over; or that
    they are ignored.

    Empty if LOCAL_RANK is set, which every launcher of ranks sets, and without such variables.
    """
    if not is_worker():
        ignored = {"RANK", "WORLD_SIZE"} & os.environ.keys() and os.environ.get("WORLD_SIZE") != "1"
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name not in os.environ]
        if not ignored:
            return ""
        there = f"the environment has {rank_variables()} but no {' and no '.join(missing)}"
        return f"{there}: this process is not a rank of another launcher"
    if "LOCAL_RANK" in os.environ:
        return ""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place = f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT', '(no MASTER_PORT)')}"
    waits = f"it waits for rank 0 at {place}" if rank else f"it waits for {plural(world - 1, 'other rank')} at {place}"
    return (
        f"this process is rank {rank} of {world}, by {rank_variables()} in the environment"
        f"{'; ' + waits if world > 1 else ''}; if no launcher has set these variables, unset them"
    )


# Index of a rank's group, and the number of its earlier starts.
GROUP: Final = "XTRAIN_GROUP"
START: Final = "XTRAIN_GROUP_START"
# Address of the store where groups agree on who takes part in a step.
LIGHTHOUSE: Final = "XTRAIN_LIGHTHOUSE"
# Messages between a group and the launcher, in the group's store: it is set up; steps may begin, the first one with all
# groups; a group has ended since; it has the state of the run; another group has finished the run.
READY, OPEN, FEWER, JOINED, OVER = "ready", "open", "fewer", "joined", "over"


def gone(group: int) -> str:
    """Return the key under which the launcher reports to all groups that this group has ended and is not
    restarted yet."""
    return f"gone/{group}"


@define(kw_only=True, eq=False)
class ReplicaGroup:
    """Replica group of this rank.

    count: number of groups. size: ranks per group. comes_back: it was restarted while others train, and gets its state
    from one of them.

    leads: it acts for the run: its first rank writes the records, answers commands and watches clocks, and its ranks
    save. taking_part: the groups of the current step.
    """

    index: int
    count: int
    size: int
    comes_back: bool
    leads: bool
    taking_part: tuple[int, ...]

    @property
    def first(self) -> int:
        """First rank of this group, numbered among the ranks of all groups."""
        return self.index * self.size


def group_of_rank(plan: Plan) -> ReplicaGroup | None:
    """Return the group that the environment names; None if the plan has no groups, or the process is in none."""
    node = groups_node(plan)
    if node is None or GROUP not in os.environ:
        return None
    index, count = int(os.environ[GROUP]), int(node.args["replicas"])
    comes_back = int(os.environ.get(START, "0")) > 0
    return ReplicaGroup(
        index=index,
        count=count,
        size=plan.mesh.world_size // count,
        comes_back=comes_back,
        leads=index == 0 and not comes_back,
        taking_part=tuple(range(count)),
    )


def plan_of_group(plan: Plan) -> Plan:
    """Return the plan as one group executes it, with the mesh of a group."""
    return evolve(plan, mesh=mesh_of_group(plan.mesh))
