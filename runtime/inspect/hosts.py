"""Comparison of a run's machines, where the doctor is started once on each of them."""

import contextlib
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from attrs import asdict, frozen
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import PrefixStore, Store

from xtrain.runtime.base.hosts import CONNECT_SECONDS, NodePlace, own_address, reach, words
from xtrain.runtime.inspect.machine import MachineFacts, Unfit

# Seconds to sum a number over all machines, and for a new file to appear elsewhere.
SUM_SECONDS: Final = 30.0
FILE_SECONDS: Final = 10.0
# Seconds by which clocks may differ: records of several ranks are sorted by time.
CLOCKS: Final = 2.0
_TIME: Final = struct.Struct("!d")


@frozen(kw_only=True)
class HostFacts:
    """Facts of a machine for the others. address, port: where it answers with its time."""

    machine: MachineFacts
    address: str
    port: int

    @classmethod
    def of_json(cls, content: dict[str, Any]) -> "HostFacts":
        return cls(machine=MachineFacts(**content["machine"]), address=content["address"], port=content["port"])


class HostsApart(Exception):
    """Machines that have not arrived or have left; the message says which or how many. do: the remedy."""

    def __init__(self, what: str, do: str = "") -> None:
        super().__init__(what)
        self.do = do or "start it once on every machine of the plan, and check that each reaches the first one"


@frozen
class HostMeeting:
    """Machines of a plan, connected through a store."""

    place: NodePlace
    nodes: int
    store: Store

    @classmethod
    def join(cls, place: NodePlace, nodes: int, seconds: float) -> "HostMeeting":
        """Wait for all machines. Raises HostsApart if they do not arrive within `seconds`."""
        first = place.index == 0
        if first:
            check_port(place.port)
        else:
            connect_to_first(place, seconds)
        try:
            # The first machine uses localhost, because its name may lead elsewhere; then the others would not arrive.
            host, timeout = "localhost" if first else place.host, timedelta(seconds=seconds)
            store: Store = TCPStore(host, place.port, is_master=first, timeout=timeout, wait_for_workers=False)
            meeting = cls(place, nodes, PrefixStore("xtrain-doctor", store))
            if first:
                connect_to_first(place, seconds)
            meeting._wait("here", seconds)
        except (RuntimeError, OSError) as error:  # errors of torch's stores are RuntimeErrors
            raise HostsApart(_apart(place, str(error).partition("\n")[0])) from None
        return meeting

    def _wait(self, what: str, seconds: float) -> None:
        """Wait until all machines have announced `what`. Raises HostsApart."""
        self.store.add(what, 1)
        deadline = time.monotonic() + seconds
        while (came := self.store.add(what, 0)) < self.nodes:
            if time.monotonic() > deadline:
                raise HostsApart(f"{came} of {self.nodes} machines have arrived within {seconds:g} s")
            time.sleep(0.02)

    def exchange(self, name: str, value: Any) -> list[Any]:
        """Return the JSON values of all machines under a name, in order. Raises HostsApart if one has left."""
        values, waits_for = [], 0
        try:
            self.store.set(f"{name}/{self.place.index}", json.dumps(value))
            for index in range(self.nodes):
                waits_for = index
                values.append(json.loads(self.store.get(f"{name}/{index}")))
        except RuntimeError:
            who = f"machine {waits_for} (--node {waits_for}, or that of Slurm) arrived, but no longer answers"
            raise HostsApart(
                who, "see what the doctor reports there, and check that it was started there only once"
            ) from None
        return values

    def leave(self) -> None:
        """Leave the meeting; the first machine keeps the store until all have left."""
        with contextlib.suppress(RuntimeError, HostsApart):
            self._wait("left", CONNECT_SECONDS) if self.place.index == 0 else self.store.add("left", 1)


def check_port(port: int) -> None:
    """Raise HostsApart if the first machine cannot listen on the port."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        what = f"port {port} cannot be opened on this machine, which is the first one: {words(error)}"
        raise HostsApart(what, "use a port in --meet that is free there") from None


def connect_to_first(place: NodePlace, seconds: float) -> None:
    """Wait until the first machine answers. Raises HostsApart.

    Without this, torch would print its own traces.
    """
    try:
        reach(place.host, place.port, seconds, note=f"machine {place.index} waits for the first machine")
    except OSError as error:
        raise HostsApart(_apart(place, words(error))) from None


def _apart(place: NodePlace, why: str) -> str:
    whom = "this machine, which is the first one, is not" if place.index == 0 else "the first machine cannot be reached"
    return f"{whom} at {place.host}:{place.port}: {why}"


def find_between_hosts(meeting: HostMeeting, machine: MachineFacts, folder: Path, device: str) -> list[Unfit]:
    """Compare this machine with the others. folder: of runs. device: `cpu` or `cuda`, for collectives."""
    findings: list[Unfit] = []
    with answering_time() as port:
        own = HostFacts(machine=machine, address=own_address(meeting.place.host, meeting.place.port), port=port)
        others = [HostFacts.of_json(facts) for facts in meeting.exchange("facts", asdict(own))]
        findings += reach_others(others, meeting.place.index)
        findings += compare_versions(others[0].machine, machine)
        findings += _shares_folder(meeting, folder)
        meeting.exchange("reached", True)  # before any machine stops answering
    # If machines cannot reach each other, a sum over all of them would only time out.
    unreached = meeting.exchange("unreached", any(finding.code == "X732" for finding in findings))
    if not any(unreached):
        findings += sum_over_hosts(meeting, device)
    return findings


@contextlib.contextmanager
def answering_time() -> Iterator[int]:
    """Answer connections with the time of this machine; yield the port."""
    both = {"family": socket.AF_INET6, "dualstack_ipv6": True} if socket.has_dualstack_ipv6() else {}
    with socket.create_server(("", 0), backlog=1024, **both) as server:
        ended = threading.Event()

        def serve() -> None:
            while not ended.is_set():
                with contextlib.suppress(OSError):
                    other, _ = server.accept()
                    with other:
                        other.sendall(_TIME.pack(time.time()))

        server.settimeout(0.1)
        thread = threading.Thread(target=serve, name="time for other machines", daemon=True)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            ended.set()
            thread.join()


def reach_others(hosts: Sequence[HostFacts], own: int) -> Iterator[Unfit]:
    """Connect to all other machines; report those that do not answer, and clocks that differ from ours.

    Each pair of clocks is compared once, by the later machine.
    """
    for index, host in enumerate(hosts):
        if index == own:
            continue
        try:
            apart, within = clock_of(host)
        except OSError as error:
            yield Unfit(
                code="X732",
                what=f"{host.machine.host} ({host.address}) cannot be reached from here: {words(error)}",
                do="open all TCP ports between the machines of a job, and see that names of machines lead to the "
                "network that joins them (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)",
            )
            continue
        if index < own and abs(apart) - within > CLOCKS:
            yield Unfit(
                code="W708",
                what=f"the clock of {host.machine.host} is {abs(apart):.1f} s {'ahead of' if apart > 0 else 'behind'} "
                "that of this machine",
                do="have both set by a time server (chrony, ntpd): records of ranks are put in order by their times",
            )


def clock_of(host: HostFacts) -> tuple[float, float]:
    """Return the seconds that another machine's clock is ahead, and the error bound. Raises OSError."""
    before = time.time()
    with socket.create_connection((host.address, host.port), timeout=CONNECT_SECONDS) as other:
        answer = b""
        while len(answer) < _TIME.size:
            part = other.recv(_TIME.size - len(answer))
            if not part:
                raise OSError("it closed the connection")
            answer += part
    after = time.time()
    return _TIME.unpack(answer)[0] - (before + after) / 2, (after - before) / 2


def compare_versions(first: MachineFacts, own: MachineFacts) -> Iterator[Unfit]:
    """Report versions that differ from the first machine's."""
    names = dict.fromkeys((*first.versions, *own.versions))
    both = ((name, own.versions.get(name), first.versions.get(name)) for name in names)
    apart = [f"{name} {here} here and {there} on {first.host}" for name, here, there in both if here != there]
    if own.driver != first.driver:
        apart.append(f"driver {own.driver or 'none'} here and {first.driver or 'none'} on {first.host}")
    if apart:
        yield Unfit(
            code="X735",
            what="; ".join(apart),
            do="install the same on all machines, best as one container image or one environment that they share",
        )


def _shares_folder(meeting: HostMeeting, folder: Path) -> Iterator[Unfit]:
    """Check that the folder of runs is shared: a file made by the first machine appears on the others."""
    mark = None
    if meeting.place.index == 0:
        with contextlib.suppress(OSError):  # reported by another check
            folder.mkdir(parents=True, exist_ok=True)
            mark = folder / f".xtrain-doctor-{secrets.token_hex(8)}"
            mark.touch()
    try:
        name = meeting.exchange("mark", mark.name if mark else "")[0]
        seen = not name or _appears(folder / name)
        meeting.exchange("seen", True)
    finally:
        if mark is not None:
            mark.unlink(missing_ok=True)
    if not seen:
        yield Unfit(
            code="X706",
            what=f"{folder.absolute()} is not the same folder here as on the first machine",
            do="set workspace.root to a folder on a file system that all machines share",
        )


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + FILE_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def sum_over_hosts(meeting: HostMeeting, device: str) -> Iterator[Unfit]:
    """Sum a number over all machines as ranks do: with gloo, and on devices also with NCCL."""
    index, nodes = meeting.place.index, meeting.nodes
    for backend in ("gloo", "nccl") if device == "cuda" else ("gloo",):
        store = PrefixStore(f"sum-{backend}", meeting.store)
        place = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
        fault = ""
        try:
            dist.init_process_group(
                backend, store=store, rank=index, world_size=nodes, timeout=timedelta(seconds=SUM_SECONDS)
            )
            total = torch.full((), float(index + 1), device=place)
            dist.all_reduce(total)
            if total.item() != nodes * (nodes + 1) / 2:
                fault = f"the sum of 1 to {nodes} came out as {total.item():g}"
        except RuntimeError as error:
            fault = str(error).partition("\n")[0]
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        if fault:
            name = "GLOO_SOCKET_IFNAME" if backend == "gloo" else "NCCL_SOCKET_IFNAME"
            yield Unfit(
                code="X732",
                what=f"the machines cannot sum a number over {backend}: {fault}",
                do=f"set {name} to the network interface that joins them, and open all TCP ports between them",
            )
