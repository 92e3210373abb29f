"""Agreeing to stop: the one exchange of a step, in which all ranks hear who wants the run to end, and why."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from ..planner.stops import SIGNALS
from .fake import numbers
from .signals import StopRequests
from .state import Halt, Rank
from .timers import Clocks

BEGAN = "XTRAIN_BEGAN"
"""Environment variable: when the command was given, in seconds since 1970."""


class Agreement:
    """What ranks tell each other at a step boundary, in one sum over all of them."""

    def __init__(self, rank: Rank, requests: StopRequests, clocks: Clocks, limits: "Limits | None") -> None:
        self._rank, self._requests, self._clocks, self._limits = rank, requests, clocks, limits
        self._signals = [(event, clocks.ask_for(self._asked(event), everywhere=True)) for event in SIGNALS]
        self._limit = None if limits is None else clocks.ask_for(limits.passed)

    def _asked(self, event: str) -> Callable[[], float]:
        received = self._requests.received
        return lambda: event in received

    def meet(self, valid_tokens: float) -> float:
        """`valid_tokens` of all ranks. Raises Halt on all ranks alike if the run is to stop."""
        values = [valid_tokens, *self._clocks.ask(first=self._rank.is_first)]
        if self._rank.world_size > 1:
            shared = torch.tensor(values, dtype=torch.float64, device=self._rank.device)
            dist.all_reduce(shared)
            values = numbers(shared, [1.0] + [0.0] * (len(values) - 1))
        self._clocks.answer(values[1:])
        for event, number in self._signals:
            if self._clocks.due(number):
                ranks = self._clocks.value(number)
                self._halt(event, f"{ranks} of {self._rank.world_size} ranks received it")
        if self._limits is not None and self._limit is not None and self._clocks.due(self._limit):
            self._halt(*self._limits.named(self._clocks.value(self._limit)))
        return values[0]

    def _halt(self, event: str, reason: str) -> None:
        self._requests.hurry(event)  # on the ranks that knew nothing yet, too
        raise Halt(event, reason)


class Limits:
    """What the first rank looks for besides signals. Numbers stand for events where all ranks hear of them."""

    def __init__(self, time_limit_seconds: float | None, stop_file: str | None) -> None:
        began = float(os.environ.get(BEGAN, time.time()))
        self._seconds = time_limit_seconds
        self._end = None if time_limit_seconds is None else time.monotonic() + began + time_limit_seconds - time.time()
        self._file = None if stop_file is None else Path(stop_file)
        self._lay_there = self._file is not None and self._file.exists()
        self._next_look = 0.0

    def passed(self) -> float:
        """1: the time is over; 2: the file is there; 3: it was there from the start; 0: none of them."""
        now = time.monotonic()
        if self._end is not None and now >= self._end:
            return 1
        if self._file is None or now < self._next_look:
            return 0
        if self._lay_there:
            return 3
        self._next_look = now + LOOK_SECONDS
        return 2 if self._file.exists() else 0

    def named(self, number: int) -> tuple[str, str]:
        """(event, why it occurred)."""
        if number == 1:
            return "time_limit", f"launch.time_limit, {self._seconds:g} s, is over"
        if number == 2:
            return "stop_file", f"there is a file {self._file}"
        return (
            "stop_file",
            f"the file {self._file} was there when the run began: remove it, and start the run again",
        )


LOOK_SECONDS = 1.0
