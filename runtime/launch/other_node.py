"""The launcher of a machine other than the first: it starts ranks, and ends them, as that of the first one says
(first_node.py has what they tell each other)."""

import json
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from subprocess import Popen
from types import FrameType
from typing import TYPE_CHECKING, Any

from attrs import asdict, define, field, fields

from xtrain.records.end_status import EndStatus
from xtrain.runtime.control.signals import stop_signals
from xtrain.runtime.data.errors import DataError
from xtrain.runtime.errors import EnvironmentFault
from xtrain.runtime.launch.first_node import ELAPSED, END, LOST, OTHER_PLAN, PAUSE, PLAN, RankStart, Said, place_of
from xtrain.runtime.launch.node_place import ARRIVAL, NodePlace
from xtrain.runtime.launch.parent import OTHERS_GO_ON
from xtrain.runtime.launch.reaching import reach, words
from xtrain.runtime.outcome import EXIT_CODES, STATUS_OF_SIGNAL
from xtrain.runtime.provenance.start import BEGAN
from xtrain.runtime.run_directory.saved_plan import PATIENCE as SHOWS
from xtrain.runtime.run_directory.saved_plan import planned

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]


def follow_first_node(place: NodePlace, plan: str, check: Callable[[], None], stop_seconds: float) -> int:
    """Start ranks on this machine, and end them, as the launcher of the first one says; the exit code of the run. Main
    thread only.

    plan: the id of the own one. check: raises EnvironmentFault where the plan cannot run on this machine; so does this
    where the first one has another plan, or is not to be reached. stop_seconds: that ranks have to save and leave if it
    is gone.
    """
    return _Follower(place, plan, stop_seconds).run(check)


@define(eq=False)
class _Follower:
    place: NodePlace
    plan: str
    stop_seconds: float
    _ranks: dict[int, Popen[bytes]] = field(factory=dict)
    _to_start: dict[int, tuple[RankStart, float]] = field(factory=dict)
    """Until when this machine may show the plan late."""
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
            message = f"node {place.index} does not reach the first one at {place.host}:{place.port}: {why}"
            raise EnvironmentFault("X716", message) from None
        finally:
            self._end()

    def _check_plan(self, store: "TCPStore") -> None:
        """One that is of another run takes nobody's place in this one."""
        of_first = store.get(PLAN).decode()
        if of_first != self.plan:
            message = f"node {self.place.index} has plan {self.plan}, and node 0 has plan {of_first}; start the same "
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
        given = RankStart(**{each.name: told[each.name] for each in fields(RankStart)})
        given.environment[OTHERS_GO_ON] = "1"
        if (elapsed := given.environment.pop(ELAPSED, None)) is not None:
            given.environment[BEGAN] = str(time.monotonic() - float(elapsed))
        self._to_start[told["start"]] = given, time.monotonic() + SHOWS

    def _start_ranks(self) -> None:
        """Those for which this machine shows the plan."""
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
        """The first machine tells all ranks, those here among them."""
        self._said.asked.append(number)

    def _ask_to_stop(self) -> None:
        """Without the first launcher nothing is started again: ranks save, if they still can, and leave."""
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
