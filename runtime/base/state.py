"""State that ops share while a plan runs: this rank, the progress of the run, and clocks that ranks agree on."""

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from attrs import asdict, define, field, frozen

from xtrain.runtime.base.process import ReplicaGroup


@frozen(kw_only=True)
class Rank:
    """This process among all of them."""

    rank: int
    local_rank: int
    world_size: int
    data_rank: int
    data_ranks: int
    device: torch.device
    pipeline_ranks: int
    coordinates: dict[str, int]
    """Its place on every axis of the mesh."""
    replica: ReplicaGroup | None = None
    """The replica group that the mesh is of, where there are several."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def leads(self) -> bool:
        """Whether it is the first rank of those that speak for the run."""
        return self.is_first and (self.replica is None or self.replica.leads)

    @property
    def replicas(self) -> int:
        """How many copies of all these ranks there are."""
        return 1 if self.replica is None else self.replica.count

    @property
    def row_rank(self) -> int:
        """Its place among the `row_ranks` that the rows of a step are dealt to, those of all replica groups."""
        return self.data_rank + (0 if self.replica is None else self.replica.index * self.data_ranks)

    @property
    def row_ranks(self) -> int:
        return self.data_ranks * self.replicas

    @property
    def is_tp_first(self) -> bool:
        """Whether what this rank counts of its positions is to be summed: tensor-parallel peers count the same."""
        return self.coordinates["tp"] == 0


@define(kw_only=True)
class BadSteps:
    """Steps that nothing was learned from, as their loss or gradient norm was not a number, or as no rank had a token
    to learn from. Steps count from 1; 0: none yet.

    in_a_row: those whose numbers were none, without a good step behind them. total: the same of the run. empty: those
    without a token, without a good step behind them. last_good: the last step that was good. went_back: each time, from
    which step to which. latest: the last of those in a row, as (step, loss, gradient norm), to be told of when it comes
    to that; they are not saved.
    """

    in_a_row: int = 0
    total: int = 0
    empty: int = 0
    last_good: int = 0
    went_back: list[tuple[int, int]] = field(factory=list)
    latest: deque[tuple[int, float, float]] = field(factory=lambda: deque(maxlen=10))

    def counters(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, as JSON."""
        counts = {"in_a_row": self.in_a_row, "total": self.total, "empty": self.empty, "last_good": self.last_good}
        return {**counts, "went_back": [list(each) for each in self.went_back]}

    @classmethod
    def of(cls, counters: dict[str, Any]) -> "BadSteps":
        """What a checkpoint has kept; of what it does not name there was none."""
        return cls(
            in_a_row=counters.get("in_a_row", 0),
            total=counters.get("total", 0),
            empty=counters.get("empty", 0),
            last_good=counters.get("last_good", 0),
            went_back=[(before, after) for before, after in counters.get("went_back", ())],
        )


@define
class NormStatistics:
    """Mean and variance of gradient norms that were not spikes: of the first steps of all, then moving averages.

    Those of ZClip (Kumar et al. 2025, arXiv 2504.02507): μ ← a μ + (1 − a) n; σ² ← a σ² + (1 − a) (n − μ)², n being the
    norm after it was scaled down.
    """

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def limit(self, norm: float, deviations: float, decay: float, first: int) -> float:
        """What a norm is scaled down to, infinite if it is no spike; the statistics take it in.

        One whose distance from the mean is z standard deviations, more than d = `deviations`, comes down to
        μ + d² σ / z: the further it lies out, the nearer to the mean. decay: a; first: of how many steps mean and
        variance are taken as they are, with nothing scaled down.
        """
        self.count += 1
        if self.count <= first:  # Welford's sums
            before = norm - self.mean
            self.mean += before / self.count
            self.variance += (before * (norm - self.mean) - self.variance) / self.count
            return math.inf
        deviation = math.sqrt(self.variance)
        z = (norm - self.mean) / (deviation + 1e-6)
        limit = self.mean + deviations**2 * deviation / z if z > deviations else math.inf
        self.mean = decay * self.mean + (1 - decay) * min(norm, limit)
        self.variance = decay * self.variance + (1 - decay) * (min(norm, limit) - self.mean) ** 2
        return limit


@define
class Progress:
    """How far the run has come. `step` counts optimizer steps that have ended, `tokens` the positions they saw.

    measured: metric → (the step after which it was measured last, its value), as `eval/web/loss`.
    """

    step: int = 0
    tokens: int = 0
    measured: dict[str, tuple[int, float]] = field(factory=dict)
    bad: BadSteps = field(factory=BadSteps)
    norms: NormStatistics = field(factory=NormStatistics)
    bad_tasks: dict[str, int] = field(factory=dict)
    """Of each task the steps in a row that it has left out, as its numbers were none."""

    def counters(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, as JSON."""
        norms = {"gradient_norms": asdict(self.norms)} if self.norms.count else {}
        tasks = {"bad_tasks": dict(self.bad_tasks)} if any(self.bad_tasks.values()) else {}
        return {"step": self.step, "tokens": self.tokens, "nonfinite": self.bad.counters(), **norms, **tasks}

    def take(self, state: dict[str, Any]) -> None:
        """Go on from what a checkpoint has kept; what was measured later is of steps that are yet to come."""
        self.step, self.tokens = state["step"], state["tokens"]
        self.bad = BadSteps.of(state.get("nonfinite", {"last_good": self.step}))
        self.norms = NormStatistics(**state.get("gradient_norms", {}))
        self.bad_tasks = dict(state.get("bad_tasks", {}))
        self.measured = {name: found for name, found in self.measured.items() if found[0] <= self.step}
        self.measured |= {name: (self.step, value) for name, value in state.get("metrics", {}).items()}


Resources = dict[str, Any]


@define
class Clocks:
    """One clock a period, infinite where a question is asked instead."""

    _periods: list[float] = field(factory=list)
    _heard: list[float] = field(factory=list)
    _last: list[float] = field(factory=list)
    _questions: dict[int, Callable[[], float]] = field(factory=dict)
    _everywhere: list[tuple[int, Callable[[], float]]] = field(factory=list)

    def add(self, seconds: float) -> int:
        """A clock, which all that recur with its period share, so that they fall into the same steps; its number."""
        return self._periods.index(seconds) if seconds in self._periods else self._new(seconds)

    def _new(self, seconds: float) -> int:
        self._periods.append(seconds)
        self._heard.append(0.0)
        self._last.append(time.monotonic())
        return len(self._periods) - 1

    def ask_for(self, question: Callable[[], float], *, everywhere: bool = False) -> int:
        """A question whose answer, 0 for no, all ranks are to hear; returns its number.

        It is answered by the first rank, or with `everywhere` by all of them: then their sum is heard.
        """
        number = self._new(float("inf"))
        if everywhere:
            self._everywhere.append((number, question))
        else:
            self._questions[number] = question
        return number

    def ask(self, *, first: bool, waiting: bool = False) -> list[float]:
        """What this rank has to say: 1 for each clock that has run out, and the answers to questions.

        waiting: of clocks nothing is said; they go on.
        """
        found = [0.0] * len(self._periods)
        if first and not waiting:
            now = time.monotonic()
            found = [float(now - last >= period) for last, period in zip(self._last, self._periods, strict=True)]
        if first:
            for number, question in self._questions.items():
                found[number] = float(question())
        for number, question in self._everywhere:
            found[number] = float(question())
        return found

    def answer(self, heard: list[float]) -> None:
        """Take what was agreed; a clock that ran out starts again."""
        self._heard = heard
        for number, value in enumerate(heard):
            if value:
                self._last[number] = time.monotonic()

    def put_back(self) -> None:
        """What was due by the last agreement has not been done: those clocks run out again at the next one."""
        for number, value in enumerate(self._heard):
            if value and self._periods[number] != float("inf"):
                self._last[number] = float("-inf")

    def due(self, number: int) -> bool:
        """Whether a clock ran out, or a question was answered by anything but 0, at the last agreement."""
        return self._heard[number] != 0

    def value(self, number: int) -> int:
        """What was answered at the last agreement."""
        return int(self._heard[number])
