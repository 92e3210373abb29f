"""Process of a run: its launcher, its start, its replica group, and the cause of its failure.

Under torchrun the cause is left in a file that torchrun shows below its own traceback. A replica group has a process
group of its own, which may end and be started again while other groups train.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from attrs import define, evolve

from xtrain.plan.graph import groups_node
from xtrain.plan.mesh import mesh_of_group
from xtrain.plan.plan import Plan
from xtrain.runtime.base.errors import EnvironmentFault, exit_process
from xtrain.text.units import plural

# Says to a rank that others go on without it when its launcher dies.
OTHERS_GO_ON: Final = "XTRAIN_OTHERS_GO_ON"


def die_with_launcher(launcher: int) -> None:
    """Ask the kernel for a SIGTERM when the launcher dies, so that no rank outlives it (Linux; elsewhere nothing).
    Where others go on without this process it is a SIGKILL: they do not hear of a stop."""
    PR_SET_PDEATHSIG = 1
    number = signal.SIGKILL if OTHERS_GO_ON in os.environ else signal.SIGTERM
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != launcher:
            exit_process(1)  # it died before the kernel was asked


FILE: Final = "TORCHELASTIC_ERROR_FILE"
# Seconds by which the first rank may say it after the others.
LATER: Final = 10


def write_cause(text: str, *, of_first: bool = False) -> None:
    """Leave the cause of a failure where the launcher, if there is one, looks for it.

    of_first: the first rank says it. Of several files torchrun shows the earliest last.
    """
    path = os.environ.get(FILE)
    if not path:
        return
    at = int(time.time()) + (LATER if of_first else 0)
    text = "as the first rank says" if of_first else text
    said = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(at)}}
    with suppress(OSError):
        Path(path).write_text(json.dumps({"message": said}), encoding="utf-8")


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


# Tell a rank which group it is of, and how often that one was started before.
GROUP: Final = "XTRAIN_GROUP"
START: Final = "XTRAIN_GROUP_START"
# And where the ranks of the groups ask who takes part in a step.
LIGHTHOUSE: Final = "XTRAIN_LIGHTHOUSE"
# What a group and the launcher tell each other, in the store of the group: it is set up; steps may begin, the first of
# them with all groups; one of these has ended since; it has the state of the run; another has come to the end of it.
READY, OPEN, FEWER, JOINED, OVER = "ready", "open", "fewer", "joined", "over"


def gone(group: int) -> str:
    """What the launcher tells all groups, in their stores: this one has ended, and is not started again yet."""
    return f"gone/{group}"


@define(kw_only=True, eq=False)
class ReplicaGroup:
    """The group of this rank. count: of all groups. size: its ranks. comes_back: it was started again while others
    train, and has nothing to go on from but what one of these gives it.

    leads: it speaks for the run: its first rank writes the records, answers commands and looks at clocks, and its ranks
    save. taking_part: the groups of the step under way.
    """

    index: int
    count: int
    size: int
    comes_back: bool
    leads: bool
    taking_part: tuple[int, ...]

    @property
    def first(self) -> int:
        """The number of its first rank among those of all groups."""
        return self.index * self.size


def group_of_rank(plan: Plan) -> ReplicaGroup | None:
    """The group that the environment names; None where the plan has none, or no launcher has started any."""
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
    """The plan as the ranks of one group execute it: with their mesh for that of all."""
    return evolve(plan, mesh=mesh_of_group(plan.mesh))
