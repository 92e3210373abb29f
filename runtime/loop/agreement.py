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
    """Run collectives on a separate CUDA stream, so that the host waits for them and not for running computation. Use
    only tensors that are created inside; no effect on other devices."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(_stream(device)):
        yield


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Agreement:
    """One all-reduce per step that shares stop requests, limits, commands and alerts among all ranks."""

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
        """Sums numbers over replica groups; raises StepAgain on all ranks of this group if that fails."""

    def among(self, rank: Rank, limits: "Limits | None") -> None:
        """Register signals, limits (if any), commands and alerts for the agreement."""
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
        """Sum each of `counts` over all ranks. Raises Halt on all ranks alike if the run is to stop."""
        return self._meet(counts, waiting=False)

    def meet_waiting(self) -> None:
        """Agree between steps, while the run waits; expired clocks are noticed at the next step."""
        self._meet((), waiting=True)

    def _meet(self, counts: tuple[float, ...], *, waiting: bool) -> list[float]:
        rank = self._rank
        assert rank is not None
        values = [*counts, *self._clocks.ask(first=rank.leads, waiting=waiting)]
        if rank.world_size > 1:
            with beside(rank.device):  # the previous step's update may still be running
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
        self._requests.hurry(event)  # also on ranks that did not receive it
        raise Halt(event, reason)


class Limits:
    """Time limit and stop file, which the first rank checks. A number stands for each event when ranks agree."""

    def __init__(self, time_limit_seconds: float | None, stop_file: str | None) -> None:
        began = float(os.environ.get(BEGAN, time.monotonic()))
        self._seconds = time_limit_seconds
        self._end = None if time_limit_seconds is None else began + time_limit_seconds
        self._file = None if stop_file is None else Path(stop_file)
        self.passed = 3 if self._is_there() else 0
        """1: the time limit is over; 2: the stop file exists; 3: it existed from the start; 0: none of these."""
        self.look()

    def look(self) -> None:
        """Check the limits; called in the background."""
        if self.passed == 0 and self._end is not None and time.monotonic() >= self._end:
            self.passed = 1
        if self.passed == 0 and self._is_there():
            self.passed = 2

    def _is_there(self) -> bool:
        try:
            return self._file is not None and self._file.exists()
        except OSError:
            return False  # the folder may not be read

    def named(self, number: int) -> tuple[str, str]:
        """Return (event, reason)."""
        if number == 1:
            return "time_limit", f"launch.time_limit of {self._seconds:g} s is over"
        if number == 2:
            return "stop_file", f"the stop file {self._file} exists"
        return (
            "stop_file",
            f"the stop file {self._file} existed when the run started: remove it, and start the run again",
        )


# Seconds between checks of waiting ranks: unnoticeable, and without busy waiting.
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
    """Wait until the run is resumed, carrying out commands meanwhile. Raises Halt if it is to stop."""

    def wait_until_resumed(step: Step) -> None:
        assert control.order is not None
        under_way.cut_short("the run is paused")
        records.flush(progress.step)  # shows the last step while the run waits
        control.paused, began = True, time.monotonic()
        control.report(control.order, ControlState.DONE, f"the run is paused after step {progress.step:,}")
        while control.paused and not control.stopping:
            time.sleep(WAIT_SECONDS)
            if beat is not None:
                beat.mark()
            agreement.meet_waiting()
            control.carry_out(step)
        records.event(PausedEvent(step=progress.step, seconds=time.monotonic() - began))

    return wait_until_resumed
