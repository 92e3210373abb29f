"""Ranks on several machines: the launcher of the first machine, and the launchers that follow it."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from subprocess import DEVNULL, Popen
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, Protocol

from attrs import asdict, define, evolve, field, fields, frozen

from xtrain.plan.plan import Plan
from xtrain.records.names import EndStatus
from xtrain.runtime.base.errors import EXIT_CODES, STATUS_OF_SIGNAL, DataError, EnvironmentFault
from xtrain.runtime.base.hosts import ARRIVAL, LOOPBACK, NodePlace, reach, words
from xtrain.runtime.base.process import BEGAN, OTHERS_GO_ON
from xtrain.runtime.jobs.launch import rank_command
from xtrain.runtime.observe.provenance import PATIENCE as SHOWS
from xtrain.runtime.observe.provenance import planned
from xtrain.runtime.observe.stopping import stop_signals
from xtrain.text.units import plural

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]


# Seconds without news after which a machine is lost.
LOST: Final = 30.0
# Seconds for killed ranks to end, and for other machines to receive the end of the run.
END: Final = 20.0
PAUSE: Final = 0.1
# Store keys of the plan's id, and of the message of a machine with another plan.
PLAN, OTHER_PLAN = "plan", "other plan"
# Environment key that carries the seconds since the command began to another machine.
ELAPSED: Final = "elapsed"


class RankProcess(Protocol):
    """Rank that was started here or on another machine."""

    def poll(self) -> int | None:
        """Return the exit code as Popen does; None while it runs."""
        ...

    def send_signal(self, sig: int, /) -> None: ...

    def wait(self) -> int: ...


@frozen(kw_only=True)
class RankStart:
    """Instructions to start a rank. log: folder for its output. plan: the id of the plan in `directory`."""

    directory: str
    plan: str
    log: str
    environment: dict[str, str]

    def process(self) -> Popen[bytes]:
        """Start the rank on this machine."""
        log = Path(self.log)
        log.mkdir(parents=True, exist_ok=True)
        command, environment = rank_command(Path(self.directory), os.getpid()), {**os.environ, **self.environment}
        with (log / "stdout.log").open("wb") as out, (log / "stderr.log").open("wb") as err:
            # In its own session: only the launcher receives Ctrl-C, and passes it on once.
            return Popen(command, stdin=DEVNULL, stdout=out, stderr=err, env=environment, start_new_session=True)


class OneNode:
    """Machine of a plan that uses only this one."""

    @property
    def host(self) -> str:
        """The address by which all machines reach this one."""
        return LOOPBACK

    def has(self, rank: int) -> bool:
        """Return True if the machine of a rank is present."""
        return True

    def start(self, rank: int, given: RankStart) -> RankProcess:
        return given.process()

    def gone_with(self, process: RankProcess) -> int | None:
        """Return the number of the lost machine that ran this rank; None if the rank ended by itself."""
        return None

    def look(self, begun: bool) -> list[int]:
        """Check the other machines; return, in order, the stop signals of the machine that received most. begun: the
        run is running. Raises EnvironmentFault if the run cannot start because a machine is missing or does not fit."""
        return []

    def close(self, code: int) -> None:
        """Let the other machines exit."""


@define(eq=False)
class Said:
    """Report of another machine's launcher. times: number of the report. ended: number of a rank → its exit code.
    asked: stop signals. fault: why the plan cannot run there, as code and message."""

    times: int = 0
    ended: dict[str, int] = field(factory=dict)
    asked: list[int] = field(factory=list)
    fault: tuple[str, str] | None = None


@define(eq=False)
class _OtherNode:
    """Another machine, seen from the first one. number: of its launcher, among those that have joined for it. moved:
    time of its last new report."""

    store: "TCPStore"
    index: int
    number: int
    moved: float
    said: Said = field(factory=Said)
    lost: bool = False
    told: int = 0

    def lose(self) -> None:
        """Mark the machine and its ranks as lost; if its launcher still runs, it is told to exit."""
        self.lost = True
        self.tell(leave=EXIT_CODES[EndStatus.ENVIRONMENT])

    def tell(self, **what: Any) -> None:
        place = place_of(self.index, self.number)
        with suppress(RuntimeError):
            self.store.set(f"{place}/told/{self.told + 1}", json.dumps(what))
            self.told = self.store.add(f"{place}/told", 1)


@define(eq=False)
class _OtherRank:
    """Rank on another machine. number: among all that were started there."""

    node: _OtherNode
    number: int

    @property
    def is_gone(self) -> bool:
        """True if its machine is lost before its exit code was reported."""
        return self.node.lost and str(self.number) not in self.node.said.ended

    def poll(self) -> int | None:
        return -signal.SIGKILL if self.is_gone else self.node.said.ended.get(str(self.number))

    def send_signal(self, sig: int, /) -> None:
        self.node.tell(signal=sig, of=self.number)

    def wait(self) -> int:
        """Wait for a killed rank. A machine where it does not end is lost."""
        deadline = time.monotonic() + END
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                self.node.lose()
            _hear(self.node.store, [self.node])
            time.sleep(PAUSE)
        return code


@define(eq=False)
class FirstNode(OneNode):
    """Machines of a plan, seen from the first one."""

    plan: Plan
    place: NodePlace
    store: "TCPStore"
    _nodes: dict[int, _OtherNode] = field(factory=dict)
    _arrivals: int = 0
    _starts: int = 0
    _waits_since: float = field(factory=time.monotonic)

    @classmethod
    def open(cls, plan: Plan, place: NodePlace) -> "FirstNode":
        """Open the store of all machines. Raises EnvironmentFault if another program uses its port, or if its name does
        not lead to this machine."""
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        try:
            store = TCPStore(
                LOOPBACK, place.port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LOST)
            )
            reach(place.host, place.port, LOST, note="the first node cannot reach itself")
        except (RuntimeError, ValueError, OSError) as error:
            why = words(error)
            message = f"machines cannot meet at {place.host}:{place.port}: {why}; use a --meet HOST:PORT whose "
            raise EnvironmentFault("X716", f"{message}host is this machine and whose port is free") from None
        store.set(PLAN, plan.id)
        return cls(plan=plan, place=place, store=store)

    @property
    def host(self) -> str:
        return self.place.host

    def has(self, rank: int) -> bool:
        index = self._index(rank)
        return index == self.place.index or (index in self._nodes and not self._nodes[index].lost)

    def start(self, rank: int, given: RankStart) -> RankProcess:
        index = self._index(rank)
        if index == self.place.index:
            return given.process()
        self._starts += 1
        environment = dict(given.environment)
        if (began := environment.pop(BEGAN, None)) is not None:  # monotonic clocks differ between machines
            environment[ELAPSED] = str(time.monotonic() - float(began))
        self._nodes[index].tell(start=self._starts, **asdict(evolve(given, environment=environment)))
        return _OtherRank(self._nodes[index], self._starts)

    def gone_with(self, process: RankProcess) -> int | None:
        return process.node.index if isinstance(process, _OtherRank) and process.is_gone else None

    def look(self, begun: bool) -> list[int]:
        self._admit()
        there = [node for node in self._nodes.values() if not node.lost]
        _hear(self.store, there)
        for node in there:
            if time.monotonic() - node.moved > LOST:
                node.lose()
            if node.said.fault is not None:
                node.lose()
                if not begun:
                    code, message = node.said.fault
                    raise EnvironmentFault(code, f"node {node.index}: {message}")
        if not begun and self.store.check([OTHER_PLAN]):
            raise EnvironmentFault("X703", self.store.get(OTHER_PLAN).decode())
        if begun:
            self._waits_since = time.monotonic()
        elif time.monotonic() - self._waits_since > ARRIVAL:
            self._check_arrivals()
        return max((node.said.asked for node in there), key=len, default=[])

    def _check_arrivals(self) -> None:
        nodes = self.plan.launch["nodes"]
        missing = [str(index) for index in range(1, nodes) if index not in self._nodes or self._nodes[index].lost]
        if missing:
            where = f"{self.place.host}:{self.place.port}"
            message = f"of {plural(nodes, 'node')} that meet at {where}, these have not arrived within {ARRIVAL:g} s: "
            raise EnvironmentFault("X716", f"{message}{', '.join(missing)}; was `xtrain run` started there?")

    def close(self, code: int) -> None:
        """Let the other machines exit, including one that arrives within a while."""
        told: set[tuple[int, int]] = set()
        deadline = time.monotonic() + END
        while True:
            self._admit()
            for node in self._nodes.values():
                if (node.index, node.number) not in told:
                    node.tell(leave=code)
                    told.add((node.index, node.number))
            missing = self.plan.launch["nodes"] - 1 - len(self._nodes)
            there = [node for node in self._nodes.values() if not node.lost]
            stays = any(not self.store.check([f"{place_of(node.index, node.number)}/left"]) for node in there)
            if not (missing or stays) or time.monotonic() > deadline:
                return
            time.sleep(PAUSE)

    def _index(self, rank: int) -> int:
        return rank // self.plan.launch["ranks_per_node"]

    def _admit(self) -> None:
        """Admit launchers that have arrived."""
        arrivals = self.store.add("arrivals", 0)
        if arrivals == self._arrivals:
            return
        self._arrivals = arrivals
        for index in range(1, self.plan.launch["nodes"]):
            number, before = self.store.add(f"{place_of(index)}/came", 0), self._nodes.get(index)
            if not number or not self.store.check([f"{place_of(index, number)}/says"]):
                continue  # it is about to arrive
            if before is None or before.number != number:
                if before is not None:
                    before.lose()
                self._nodes[index] = _OtherNode(self.store, index, number, time.monotonic())


def _hear(store: "TCPStore", nodes: list[_OtherNode]) -> None:
    keys = [f"{place_of(node.index, node.number)}/says" for node in nodes]
    for node, text in zip(nodes, store.multi_get(keys) if keys else (), strict=True):
        said = Said(**json.loads(text))
        if said.times != node.said.times:
            node.said, node.moved = said, time.monotonic()


def place_of(index: int, number: int | None = None) -> str:
    return f"node/{index}" if number is None else f"node/{index}/{number}"


def follow_first_node(place: NodePlace, plan: str, check: Callable[[], None], stop_seconds: float) -> int:
    """Start and end ranks on this machine as the first machine's launcher says; return the exit code of the run. Main
    thread only.

    plan: the id of this machine's plan. check: raises EnvironmentFault if the plan cannot run here. Also raised if the
    first machine has another plan or cannot be reached. stop_seconds: time for ranks to save and exit if the first
    machine is lost.
    """
    return _Follower(place, plan, stop_seconds).run(check)


@define(eq=False)
class _Follower:
    place: NodePlace
    plan: str
    stop_seconds: float
    _ranks: dict[int, Popen[bytes]] = field(factory=dict)
    _to_start: dict[int, tuple[RankStart, float]] = field(factory=dict)
    """Rank → its start, and the deadline for the plan to appear on this machine."""
    _said: Said = field(factory=Said)
    _done: int = 0

    def run(self, check: Callable[[], None]) -> int:
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        for number in stop_signals():
            signal.signal(number, self._on_signal)
        place = self.place
        fault: EnvironmentFault | DataError | None = None
        try:
            check()
        except (EnvironmentFault, DataError) as found:
            fault = found
            self._said.fault = found.code, str(found)
        try:
            note = f"node {place.index} waits for the first node"
            if not reach(place.host, place.port, ARRIVAL, note=note, stopped=lambda: bool(self._said.asked)):
                return EXIT_CODES[STATUS_OF_SIGNAL[self._said.asked[0]]]
            seconds = timedelta(seconds=LOST)
            store = TCPStore(place.host, place.port, is_master=False, wait_for_workers=False, timeout=seconds)
            self._check_plan(store)
            here = place_of(place.index, store.add(f"{place_of(place.index)}/came", 1))
            self._say(store, here)
            store.add("arrivals", 1)
            if fault is not None:
                store.set(f"{here}/left", "1")
                raise fault
            return self._follow(store, here)
        except (RuntimeError, OSError) as error:
            self._ask_to_stop()
            why = words(error)
            message = f"node {place.index} cannot reach the first node at {place.host}:{place.port}: {why}"
            raise EnvironmentFault("X716", message) from None
        finally:
            self._end()

    def _check_plan(self, store: "TCPStore") -> None:
        """Raise EnvironmentFault if this machine has another plan; it then takes no place in the run."""
        of_first = store.get(PLAN).decode()
        if of_first != self.plan:
            message = f"node {self.place.index} has plan {self.plan}, but node 0 has plan {of_first}; start the same "
            message += "spec with the same settings on all nodes"
            store.set(OTHER_PLAN, message)
            raise EnvironmentFault("X703", message)

    def _follow(self, store: "TCPStore", here: str) -> int:
        while True:
            while self._done < store.add(f"{here}/told", 0):
                self._done += 1
                told: dict[str, Any] = json.loads(store.get(f"{here}/told/{self._done}"))
                if "leave" in told:
                    self._end()
                    self._say(store, here)
                    store.set(f"{here}/left", "1")
                    return told["leave"]
                self._do(told)
            self._start_ranks()
            self._say(store, here)
            time.sleep(PAUSE)

    def _do(self, told: Mapping[str, Any]) -> None:
        if "signal" in told:
            if self._to_start.pop(told["of"], None) is not None:
                self._said.ended[str(told["of"])] = -told["signal"]
            if (process := self._ranks.get(told["of"])) is not None:
                with suppress(ProcessLookupError):
                    process.send_signal(told["signal"])
            return
        given = RankStart(**{attribute.name: told[attribute.name] for attribute in fields(RankStart)})
        given.environment[OTHERS_GO_ON] = "1"
        if (elapsed := given.environment.pop(ELAPSED, None)) is not None:
            given.environment[BEGAN] = str(time.monotonic() - float(elapsed))
        self._to_start[told["start"]] = given, time.monotonic() + SHOWS

    def _start_ranks(self) -> None:
        """Start the ranks whose plan is visible on this machine."""
        for number, (given, deadline) in [*self._to_start.items()]:
            try:
                planned(Path(given.directory), given.plan, 0.0)
                self._ranks[number] = given.process()
            except EnvironmentFault as fault:
                if time.monotonic() < deadline:
                    continue
                self._said.fault = fault.code, str(fault)
                self._said.ended[str(number)] = EXIT_CODES[EndStatus.ENVIRONMENT]
            except OSError as error:
                self._said.fault = "X706", f"no rank can be started in {given.directory}: {error.strerror}"
                self._said.ended[str(number)] = EXIT_CODES[EndStatus.ENVIRONMENT]
            del self._to_start[number]

    def _say(self, store: "TCPStore", here: str) -> None:
        self._said.times += 1
        for number, process in self._ranks.items():
            if (code := process.poll()) is not None:
                self._said.ended[str(number)] = code
        store.set(f"{here}/says", json.dumps(asdict(self._said)))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Record a signal; the first machine passes it on to all ranks, including those here."""
        self._said.asked.append(number)

    def _ask_to_stop(self) -> None:
        """Let ranks save and exit, because without the first launcher nothing is started again."""
        deadline = time.monotonic() + self.stop_seconds + END
        for process in self._ranks.values():
            process.terminate()
        while time.monotonic() < deadline and any(process.poll() is None for process in self._ranks.values()):
            time.sleep(PAUSE)

    def _end(self) -> None:
        for process in self._ranks.values():
            process.kill()
        for process in self._ranks.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(END)
