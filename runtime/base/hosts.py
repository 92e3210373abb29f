"""Machines of a run: index and address of this machine, by command line or Slurm, and the first machine's address."""

import os
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Final

from attrs import frozen

from xtrain.plan.plan import Plan
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.text.units import plural

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


# Seconds after which a wait is reported: for a name, and for an answer, which takes the first rank its imports.
NAME_NOTE_SECONDS: Final = 2.0
NOTE_SECONDS: Final = 10.0
# Seconds that a name has to resolve: that of a pod is published a while after the pod has started.
NAME_SECONDS: Final = 60.0
CONNECT_SECONDS: Final = 5.0
_PAUSE: Final = 0.1


def reach(host: str, port: int, seconds: float, *, note: str = "", stopped: Callable[[], bool] = lambda: False) -> bool:
    """Connect once, as soon as somebody listens there; False if `stopped` says before that nobody waits any more.

    note: who waits for whom, written to stderr if that takes long; nothing is written if empty. Raises OSError after
    `seconds`, or after NAME_SECONDS if the name does not resolve.
    """
    began = time.monotonic()
    while not stopped():
        try:
            socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
            return True
        except OSError as error:
            waited, unnamed = time.monotonic() - began, isinstance(error, socket.gaierror)
            if waited > (min(seconds, NAME_SECONDS) if unnamed else seconds):
                raise
            if note and waited > (NAME_NOTE_SECONDS if unnamed else NOTE_SECONDS):
                print(f"note: {note} at {host}:{port}: {words(error)}", file=sys.stderr, flush=True)
                note = ""
        time.sleep(_PAUSE)
    return False


def words(error: Exception) -> str:
    """The reason alone, in one line, without the number of the error."""
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error).partition("\n")[0]
    return f"the name does not resolve: {reason}" if isinstance(error, socket.gaierror) else reason


def check_own_name(meet: str) -> None:
    """Raise EnvironmentFault if other machines do not reach this one by its own name, by which gloo connects ranks.

    meet: the host at which the machines meet. One that is a loopback address is that of a single machine.
    """
    name, set_by_user = socket.gethostname(), "GLOO_SOCKET_IFNAME" in os.environ
    if set_by_user or _is_loopback(meet):
        return
    try:
        found = [str(address[4][0]) for address in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError as error:
        fault = words(error)
    else:
        own = next((address for address in found if _is_own(address)), None)
        if own is not None and not _is_loopback(own):
            return
        fault = f"the name leads to {own or found[0]}, which is {'not an address of' if own is None else 'only'} "
        fault += "this machine" if own is None else "known on this machine"
    raise EnvironmentFault(
        "X732",
        f"other machines do not reach this one by its own name `{name}`: {fault}; give the name an address of the "
        "network that joins the machines (/etc/hosts, DNS), or set GLOO_SOCKET_IFNAME to the interface of that network",
    )


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _is_own(address: str) -> bool:
    """By binding to it, as gloo finds out."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as own:
            own.bind((address, 0))
    except OSError:
        return False
    return True
