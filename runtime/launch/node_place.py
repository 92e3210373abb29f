"""Which machine of several this is, where one process is started on each: by the command line, or by Slurm."""

import os
import re
import socket
from collections.abc import Mapping
from typing import Final

from attrs import frozen

from xtrain.planner.plan import Plan
from xtrain.planner.units import plural
from xtrain.runtime.errors import EnvironmentFault

# Ports that a job may take: above those of services, below those that the kernel hands out (32768 and more).
FIRST_PORT, PORTS = 20_000, 12_000
# Seconds that ranks wait for the first one, which compiles the plan meanwhile and may wait for the disk.
PATIENCE: Final = 7200.0
# Seconds that the first rank, which has its plan, waits for the others: the same launcher has started them.
ARRIVAL: Final = 1800.0
LOOPBACK: Final = "127.0.0.1"
_LIST: Final = re.compile(r"([^,\[]+)(?:\[(\d+)[^\]]*\])?([^,\[]*)")


@frozen(kw_only=True)
class NodePlace:
    """index: of this machine, from 0. host, port: where the processes of all machines meet; the first one opens it."""

    index: int
    host: str
    port: int


def node_place(plan: Plan, index: int | None, meet: str | None) -> NodePlace | None:
    """The place of this machine among those of the plan; None where the plan has one machine alone.

    index, meet: as of `--node` and `--meet HOST:PORT`; None: what Slurm says of the step that this is. Raises
    EnvironmentFault.
    """
    nodes, environment = plan.launch["nodes"], os.environ
    if index is None and meet is None and in_slurm_step():
        _check_step(nodes, environment)
        if nodes > 1:
            return _of_slurm(environment)
    if index is None and meet is None:
        return None
    if index is None or meet is None:
        raise EnvironmentFault("X703", "--node and --meet belong together; give both, or neither on a single machine")
    if index >= nodes:
        raise EnvironmentFault("X703", f"--node {index} of a plan for {plural(nodes, 'node')}; number them from 0")
    host, _, port = meet.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise EnvironmentFault("X703", f"`{meet}` is no place to meet; write --meet HOST:PORT")
    return NodePlace(index=index, host=host.strip("[]"), port=int(port)) if nodes > 1 else None


def node_index(index: int | None) -> int:
    """The number of this machine: that of `--node`, else what Slurm says, else 0."""
    return index if index is not None else int(os.environ.get("SLURM_NODEID", "0")) if in_slurm_step() else 0


def in_slurm_step() -> bool:
    """Whether `srun` has started this, and not a shell for people (`srun --pty`) in which it was typed."""
    return "SLURM_STEP_ID" in os.environ and "SLURM_PTY_PORT" not in os.environ


def _check_step(nodes: int, environment: Mapping[str, str]) -> None:
    """Raise EnvironmentFault where Slurm has started this on other machines than planned, or more than once on one."""
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or 1)
    machines = int(environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES") or 1)
    if machines != nodes:
        raise EnvironmentFault(
            "X703",
            f"the plan is for {plural(nodes, 'node')}, and this step of Slurm has {machines}; start it with "
            f"`srun --nodes {nodes} --ntasks-per-node 1`",
        )
    if tasks != machines:
        raise EnvironmentFault(
            "X703",
            f"Slurm has started {tasks} tasks on {plural(machines, 'node')}, and one on each starts its ranks; start "
            "them with `srun --ntasks-per-node 1`",
        )


def _of_slurm(environment: Mapping[str, str]) -> NodePlace:
    hosts = environment.get("SLURM_STEP_NODELIST") or environment["SLURM_NODELIST"]
    return NodePlace(index=int(environment["SLURM_NODEID"]), host=first_host(hosts), port=job_port(environment))


def first_host(hosts: str) -> str:
    """Of a list as Slurm writes it: `n[07-09,12],m3` → `n07`."""
    found = _LIST.match(hosts)
    return "".join(each or "" for each in found.groups()) if found else hosts


def job_port(environment: Mapping[str, str]) -> int:
    """Another one for each step and start of a job: the next job on the machine does not meet what one has left."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    job, step, again = (int(environment.get(name) or 0) for name in names)
    return FIRST_PORT + (job * 31 + step * 7 + again) % PORTS


def own_address(host: str, port: int) -> str:
    """The address of this machine on the network that leads to the first one; nothing is sent. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as asked:
        asked.connect(address)
        return asked.getsockname()[0]


def in_url(host: str) -> str:
    """As addresses of servers have it, in which a colon comes before the port."""
    return f"[{host}]" if ":" in host else host
