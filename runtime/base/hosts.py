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

# Ports for jobs: above those of services, below the kernel's ephemeral ports (32768 and above).
FIRST_PORT, PORTS = 20_000, 12_000
# Seconds that ranks wait for the first one, which may have to compile the plan and wait for the disk.
PATIENCE: Final = 7200.0
# Seconds that the first rank, which has its plan, waits for the others: the same launcher has started them.
ARRIVAL: Final = 1800.0
LOOPBACK: Final = "127.0.0.1"
_LIST: Final = re.compile(r"([^,\[]+)(?:\[(\d+)[^\]]*\])?([^,\[]*)")


@frozen(kw_only=True)
class NodePlace:
    """Index of this machine, from 0, and address at which the processes of all machines meet; the first machine
    listens."""

    index: int
    host: str
    port: int


def node_place(plan: Plan, index: int | None, meet: str | None) -> NodePlace | None:
    """Return the place of this machine among the machines of the plan; None for a plan of one machine.

    index, meet: values of `--node` and `--meet HOST:PORT`; None: taken from the Slurm step. Raises EnvironmentFault.
    """
    nodes, environment = plan.launch["nodes"], os.environ
    if index is None and meet is None and in_slurm_step():
        _check_step(nodes, environment)
        if nodes > 1:
            hosts = environment.get("SLURM_STEP_NODELIST") or environment["SLURM_NODELIST"]
            number = int(environment["SLURM_NODEID"])
            return NodePlace(index=number, host=first_host(hosts), port=job_port(environment))
    if index is None and meet is None:
        return None
    if index is None or meet is None:
        raise EnvironmentFault("X703", "--node and --meet belong together; give both, or neither on a single machine")
    if index >= nodes:
        raise EnvironmentFault("X703", f"--node {index} of a plan for {plural(nodes, 'node')}; number them from 0")
    host, _, port = meet.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise EnvironmentFault("X703", f"`{meet}` is not a valid address to meet at; write --meet HOST:PORT")
    return NodePlace(index=index, host=host.strip("[]"), port=int(port)) if nodes > 1 else None


def node_index(index: int | None) -> int:
    """Return the index of this machine: `--node`, else Slurm's node number, else 0."""
    return index if index is not None else int(os.environ.get("SLURM_NODEID", "0")) if in_slurm_step() else 0


def in_slurm_step() -> bool:
    """Return True if `srun` started this process, other than in an interactive shell (`srun --pty`)."""
    return "SLURM_STEP_ID" in os.environ and "SLURM_PTY_PORT" not in os.environ


def _check_step(nodes: int, environment: Mapping[str, str]) -> None:
    """Raise EnvironmentFault if Slurm started this on another number of machines than planned, or more than once on
    one."""
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or 1)
    machines = int(environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES") or 1)
    if machines != nodes:
        raise EnvironmentFault(
            "X703",
            f"the plan is for {plural(nodes, 'node')}, but this Slurm step has {machines}; start it with "
            f"`srun --nodes {nodes} --ntasks-per-node 1`",
        )
    if tasks != machines:
        raise EnvironmentFault(
            "X703",
            f"Slurm has started {tasks} tasks on {plural(machines, 'node')}, but each node needs only one; start "
            "them with `srun --ntasks-per-node 1`",
        )


def first_host(hosts: str) -> str:
    """Return the first host of a list in Slurm's notation: `n[07-09,12],m3` → `n07`."""
    match = _LIST.match(hosts)
    return "".join(part or "" for part in match.groups()) if match else hosts


def job_port(environment: Mapping[str, str]) -> int:
    """Return a port that differs for each step and start of a job, so that it does not meet processes of an earlier
    job."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    job, step, again = (int(environment.get(name) or 0) for name in names)
    return FIRST_PORT + (job * 31 + step * 7 + again) % PORTS


def own_address(host: str, port: int) -> str:
    """Return this machine's address on the network that leads to the first machine; sends nothing. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as asked:
        asked.connect(address)
        return asked.getsockname()[0]


def in_url(host: str) -> str:
    """Put an IPv6 address in brackets, as URLs need it before a port."""
    return f"[{host}]" if ":" in host else host


# Seconds after which a wait is reported: for a name, and for an answer, which takes the first rank its imports.
NAME_NOTE_SECONDS: Final = 2.0
NOTE_SECONDS: Final = 10.0
# Seconds that a name has to resolve: the name of a pod is published some time after the pod starts.
NAME_SECONDS: Final = 60.0
CONNECT_SECONDS: Final = 5.0
_PAUSE: Final = 0.1


def reach(host: str, port: int, seconds: float, *, note: str = "", stopped: Callable[[], bool] = lambda: False) -> bool:
    """Connect once, as soon as the address accepts connections; return False if `stopped` becomes true before.

    note: who waits for whom, written to stderr once if it takes long; empty: nothing is written. Raises OSError after
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
    """Return the reason of an error in one line, without its number."""
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error).partition("\n")[0]
    return f"the name does not resolve: {reason}" if isinstance(error, socket.gaierror) else reason


def check_own_name(meet: str) -> None:
    """Raise EnvironmentFault if this machine's own name, by which gloo connects ranks, does not lead other machines
    here.

    meet: the host at which the machines meet; a loopback address means a single machine.
    """
    name, set_by_user = socket.gethostname(), "GLOO_SOCKET_IFNAME" in os.environ
    if set_by_user or _is_loopback(meet):
        return
    try:
        addresses = [str(address[4][0]) for address in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError as error:
        fault = words(error)
    else:
        own = next((address for address in addresses if _is_own(address)), None)
        if own is not None and not _is_loopback(own):
            return
        fault = (
            f"the name resolves to {own or addresses[0]}, which is {'not an address of' if own is None else 'only'} "
        )
        fault += "this machine" if own is None else "known on this machine"
    raise EnvironmentFault(
        "X732",
        f"other machines cannot reach this machine by its name `{name}`: {fault}; give the name an address of the "
        "network that joins the machines (/etc/hosts, DNS), or set GLOO_SOCKET_IFNAME to the interface of that network",
    )


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _is_own(address: str) -> bool:
    """Return True if this machine can bind to the address, which is how gloo checks it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as own:
            own.bind((address, 0))
    except OSError:
        return False
    return True
