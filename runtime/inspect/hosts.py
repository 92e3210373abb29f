"""Machines of a run compared with each other, where the doctor is started once on each of them."""

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

# Seconds: for a number to be summed over all machines; for a new file to be seen elsewhere.
SUM_SECONDS: Final = 30.0
FILE_SECONDS: Final = 10.0
# Seconds by which clocks may differ: records of several ranks are read in the order of their times.
CLOCKS: Final = 2.0
_TIME: Final = struct.Struct("!d")


@frozen(kw_only=True)
class HostFacts:
    """What a machine says of itself to the others. address, port: where it answers with its time."""

    machine: MachineFacts
    address: str
    port: int

    @classmethod
    def of_json(cls, text: bytes | str) -> "HostFacts":
        found = json.loads(text)
        return cls(machine=MachineFacts(**found["machine"]), address=found["address"], port=found["port"])


class HostsApart(Exception):
    """Not all machines have come, or one has left; the message says which or how many. do: about it."""

    def __init__(self, what: str, do: str = "") -> None:
        super().__init__(what)
        self.do = do or "start it once on every machine of the plan, and see whether each reaches the first one"


@frozen
class HostMeeting:
    """The machines of a plan, which have met in a store."""

    place: NodePlace
    nodes: int
    store: Store

    @classmethod
    def join(cls, place: NodePlace, nodes: int, seconds: float) -> "HostMeeting":
        """Raises HostsApart where they do not come within so many seconds."""
        first = place.index == 0
        if first:
            check_port(place.port)
        else:
            connect_to_first(place, seconds)
        try:
            # The first machine is known to itself whatever its name leads to; the others would not come then.
            host, timeout = "localhost" if first else place.host, timedelta(seconds=seconds)
            store: Store = TCPStore(host, place.port, is_master=first, timeout=timeout, wait_for_workers=False)
            meeting = cls(place, nodes, PrefixStore("xtrain-doctor", store))
            if first:
                connect_to_first(place, seconds)
            meeting._wait("here", seconds)
        except (RuntimeError, OSError) as error:  # torch's errors of stores are RuntimeErrors
            raise HostsApart(_apart(place, str(error).partition("\n")[0])) from None
        return meeting

    def _wait(self, what: str, seconds: float) -> None:
        """Until all have said this. Raises HostsApart."""
        self.store.add(what, 1)
        deadline = time.monotonic() + seconds
        while (came := self.store.add(what, 0)) < self.nodes:
            if time.monotonic() > deadline:
                raise HostsApart(f"{came} of {self.nodes} machines have come within {seconds:g} s")
            time.sleep(0.02)

    def exchange(self, name: str, value: Any) -> list[Any]:
        """What every machine gives under this name, as JSON, in their order. Raises HostsApart where one has left."""
        found, waits_for = [], 0
        try:
            self.store.set(f"{name}/{self.place.index}", json.dumps(value))
            for index in range(self.nodes):
                waits_for = index
                found.append(json.loads(self.store.get(f"{name}/{index}")))
        except RuntimeError:
            who = f"machine {waits_for} (--node {waits_for}, or that of Slurm) had come, and does not answer any more"
            raise HostsApart(who, "see what the doctor says there, and whether it was started there once") from None
        return found

    def leave(self) -> None:
        """The first machine keeps the store until all have read what they want."""
        with contextlib.suppress(RuntimeError, HostsApart):
            self._wait("left", CONNECT_SECONDS) if self.place.index == 0 else self.store.add("left", 1)


def check_port(port: int) -> None:
    """Raises HostsApart where the first machine cannot listen there."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        what = f"port {port} cannot be opened on this machine, which is the first one: {words(error)}"
        raise HostsApart(what, "give --meet a port that is free there") from None


def connect_to_first(place: NodePlace, seconds: float) -> None:
    """Wait so long until the first machine answers. Raises HostsApart.

    torch would write its own traces to the screen meanwhile.
    """
    try:
        reach(place.host, place.port, seconds, note=f"machine {place.index} waits for the first machine")
    except OSError as error:
        raise HostsApart(_apart(place, words(error))) from None


def _apart(place: NodePlace, why: str) -> str:
    whom = "this machine, which is the first one, is not" if place.index == 0 else "the first machine is not reached"
    return f"{whom} at {place.host}:{place.port}: {why}"


def find_between_hosts(meeting: HostMeeting, machine: MachineFacts, folder: Path, device: str) -> list[Unfit]:
    """What this machine finds of the others. folder: of runs. device: `cpu` or `cuda`, over which ranks exchange."""
    found: list[Unfit] = []
    with answering_time() as port:
        own = HostFacts(machine=machine, address=own_address(meeting.place.host, meeting.place.port), port=port)
        others = [HostFacts.of_json(json.dumps(each)) for each in meeting.exchange("facts", asdict(own))]
        found += reach_others(others, meeting.place.index)
        found += compare_versions(others[0].machine, machine)
        found += _shares_folder(meeting, folder)
        meeting.exchange("reached", True)  # before anybody stops to answer
    # Where machines do not reach each other, a sum over all of them would only wait for its end.
    unreached = meeting.exchange("unreached", any(each.code == "X732" for each in found))
    if not any(unreached):
        found += sum_over_hosts(meeting, device)
    return found


@contextlib.contextmanager
def answering_time() -> Iterator[int]:
    """Answer whoever connects with the time of this machine; the port."""
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
    """Connect to all machines but this one; those that do not answer, and those whose clocks are apart from ours.

    The clock of each pair is compared once, by the later of the two.
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
    """How many seconds another machine's clock is ahead of ours, and within how many that is sure. Raises OSError."""
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
    """What this machine has in other versions than the first one."""
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
    """Whether the folder of runs is the same everywhere: a file that the first machine makes, the others see."""
    mark = None
    if meeting.place.index == 0:
        with contextlib.suppress(OSError):  # said by another check
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
    """Sum a number over all machines as ranks do: with gloo, and on devices with NCCL as well."""
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
