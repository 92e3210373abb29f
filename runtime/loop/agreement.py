"""Agreement of all ranks once a step: requests to stop, limits of the run, and pauses."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from xtrain.dsl.schema.actions import SIGNALS
from xtrain.records.events import PausedEvent
from xtrain.records.names import ControlState
from xtrain.runtime.base.device import numbers
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.process import BEGAN
from xtrain.runtime.base.state import Clocks, Progress, Rank
from xtrain.runtime.loop.alerts import AlertActions
from xtrain.runtime.loop.commands import Control, UnderWay
from xtrain.runtime.nn.batch import Halt, Step, StepCall
from xtrain.runtime.observe.heartbeat import HeartbeatWriter
from xtrain.runtime.observe.records import Records
from xtrain.runtime.observe.stopping import StopRequests


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """What is sent and read meanwhile is ordered among itself, and not behind what a CUDA device still computes: the
    host waits for the former alone. Only for tensors that are made inside; on other devices it does nothing."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(_stream(device)):
        yield


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Agreement:
    """What ranks tell each other between steps, in one sum over all of them."""

    def __init__(
        self, requests: StopRequests, clocks: Clocks, control: Control, alert_actions: AlertActions | None = None
    ) -> None:
        self._requests, self._clocks, self._control = requests, clocks, control
        self._alert_actions = alert_actions or AlertActions(())
        self._signals: list[tuple[str, int]] = []
        self._limits: Limits | None = None
        self._limit = 0
        self._rank: Rank | None = None
        self.beyond: Callable[[list[float]], list[float]] | None = None
        """Adds numbers up over replica groups; raises StepAgain on all ranks of this one where that fails."""

    def among(self, rank: Rank, limits: "Limits | None") -> None:
        """From now on ranks ask for signals, for limits where there are any, and for commands."""
        self._rank, self._limits = rank, limits
        self._signals = [(event, self._clocks.ask_for(self._asked(event), everywhere=True)) for event in SIGNALS]
        if limits is not None:
            self._limit = self._clocks.ask_for(lambda: limits.passed)
        self._control.ask_through(self._clocks)
        self._alert_actions.ask_through(self._clocks)

    def _asked(self, event: str) -> Callable[[], float]:
        received = self._requests.received
        return lambda: event in received

    def meet(self, *counts: float) -> list[float]:
        """Each of `counts` summed over all ranks. Raises Halt on all ranks alike if the run is to stop."""
        return self._meet(counts, waiting=False)

    def meet_waiting(self) -> None:
        """The same between steps: clocks that run out are heard of at the next step."""
        self._meet((), waiting=True)

    def _meet(self, counts: tuple[float, ...], *, waiting: bool) -> list[float]:
        rank = self._rank
        assert rank is not None
        values = [*counts, *self._clocks.ask(first=rank.leads, waiting=waiting)]
        if rank.world_size > 1:
            with beside(rank.device):  # the update of the step before may be under way
                shared = torch.tensor(values, dtype=torch.float64, device=rank.device)
                dist.all_reduce(shared)
                values = numbers(shared, [1.0] * len(counts) + [0.0] * (len(values) - len(counts)))
        if self.beyond is not None:
            values = self.beyond(values)
        summed, heard = values[: len(counts)], values[len(counts) :]
        self._clocks.answer(heard)
        self._control.hear()
        self._alert_actions.hear()
        for event, number in self._signals:
            if self._clocks.due(number):
                self._halt(
                    event,
                    f"{self._clocks.value(number)} of {rank.world_size * rank.replicas} ranks received the signal",
                )
        if self._limits is not None and self._clocks.due(self._limit):
            self._halt(*self._limits.named(self._clocks.value(self._limit)))
        return summed

    def _halt(self, event: str, reason: str) -> None:
        self._requests.hurry(event)  # on the ranks that knew nothing yet, too
        raise Halt(event, reason)


class Limits:
    """What the first rank looks for besides signals. Numbers stand for events where all ranks hear of them."""

    def __init__(self, time_limit_seconds: float | None, stop_file: str | None) -> None:
        began = float(os.environ.get(BEGAN, time.monotonic()))
        self._seconds = time_limit_seconds
        self._end = None if time_limit_seconds is None else began + time_limit_seconds
        self._file = None if stop_file is None else Path(stop_file)
        self.passed = 3 if self._is_there() else 0
        """1: the time is over; 2: the file is there; 3: it was there from the start; 0: none of them."""
        self.look()

    def look(self) -> None:
        """See whether anything has been passed; called beside training."""
        if self.passed == 0 and self._end is not None and time.monotonic() >= self._end:
            self.passed = 1
        if self.passed == 0 and self._is_there():
            self.passed = 2

    def _is_there(self) -> bool:
        try:
            return self._file is not None and self._file.exists()
        except OSError:
            return False  # in a folder that may not be looked into

    def named(self, number: int) -> tuple[str, str]:
        """(event, why it occurred)."""
        if number == 1:
            return "time_limit", f"launch.time_limit of {self._seconds:g} s is over"
        if number == 2:
            return "stop_file", f"the stop file {self._file} exists"
        return (
            "stop_file",
            f"the stop file {self._file} existed when the run started: remove it, and start the run again",
        )


# Between two looks of ranks that wait: nobody notices a fifth of a second, and nothing is busy meanwhile.
WAIT_SECONDS = 0.2


@op("event.pause")
def pause(
    control: Control,
    agreement: Agreement,
    records: Records,
    progress: Progress,
    under_way: UnderWay,
    beat: HeartbeatWriter | None = None,
) -> StepCall:
    """Wait until the run is to go on. Commands are carried out meanwhile; raises Halt if it is to stop."""

    def run(step: Step) -> None:
        assert control.order is not None
        under_way.cut_short("the run is paused")
        records.flush(progress.step)  # who looks at a run that waits is to see its last step
        control.paused, began = True, time.monotonic()
        control.report(control.order, ControlState.DONE, f"the run is paused after step {progress.step:,}")
        while control.paused and not control.stopping:
            time.sleep(WAIT_SECONDS)
            if beat is not None:
                beat.mark()
            agreement.meet_waiting()
            control.carry_out(step)
        records.event(PausedEvent(step=progress.step, seconds=time.monotonic() - began))

    return run
