"""State that ops share while a plan runs: this rank, the progress of the run, and clocks that ranks agree on."""

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import torch
from attrs import asdict, define, field, frozen

from xtrain.dsl.schema.precision import LARGEST_SCALE
from xtrain.runtime.base.process import ReplicaGroup


@frozen(kw_only=True)
class Rank:
    """This process among all ranks."""

    rank: int
    local_rank: int
    world_size: int
    data_rank: int
    data_ranks: int
    device: torch.device
    pipeline_ranks: int
    coordinates: dict[str, int]
    """Its coordinate on every axis of the mesh."""
    replica: ReplicaGroup | None = None
    """The replica group whose ranks the mesh has; None without replica groups."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def leads(self) -> bool:
        """True on the first rank of the group that acts for the run."""
        return self.is_first and (self.replica is None or self.replica.leads)

    @property
    def replicas(self) -> int:
        """Number of replica groups."""
        return 1 if self.replica is None else self.replica.count

    @property
    def row_rank(self) -> int:
        """Index of this rank among the `row_ranks`, over all replica groups, that the rows of a step are dealt to."""
        return self.data_rank + (0 if self.replica is None else self.replica.index * self.data_ranks)

    @property
    def row_ranks(self) -> int:
        return self.data_ranks * self.replicas

    @property
    def is_tp_first(self) -> bool:
        """True if the counts of this rank enter sums over ranks: tensor-parallel peers count the same positions."""
        return self.coordinates["tp"] == 0


@define(kw_only=True)
class BadSteps:
    """Steps without an update, as their loss or gradient norm was not finite or no rank had a token to learn from.

    Steps count from 1; 0 means none. in_a_row: steps that were not finite since the last good one. total: the same of
    the whole run. empty: steps without a token since the last good one. last_good: the last good step. went_back: (from
    step, to step) of each rollback. latest: the latest of those in a row, as (step, loss, gradient norm), for the
    report; not saved.
    """

    in_a_row: int = 0
    total: int = 0
    empty: int = 0
    last_good: int = 0
    went_back: list[tuple[int, int]] = field(factory=list)
    latest: deque[tuple[int, float, float]] = field(factory=lambda: deque(maxlen=10))

    def counters(self) -> dict[str, Any]:
        """Return the counters that a checkpoint saves, as JSON."""
        counts = {"in_a_row": self.in_a_row, "total": self.total, "empty": self.empty, "last_good": self.last_good}
        return {**counts, "went_back": [list(steps) for steps in self.went_back]}

    @classmethod
    def of(cls, counters: dict[str, Any]) -> "BadSteps":
        """Return the counters of a checkpoint; missing ones are 0."""
        return cls(
            in_a_row=counters.get("in_a_row", 0),
            total=counters.get("total", 0),
            empty=counters.get("empty", 0),
            last_good=counters.get("last_good", 0),
            went_back=[(before, after) for before, after in counters.get("went_back", ())],
        )


@define
class NormStatistics:
    """Mean and variance of gradient norms without spikes: exact over the first steps, then moving averages.

    Those of ZClip (Kumar et al. 2025, arXiv 2504.02507): μ ← a μ + (1 − a) n; σ² ← a σ² + (1 − a) (n − μ)², n being the
    norm after scaling.
    """

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def limit(self, norm: float, deviations: float, decay: float, first: int) -> float:
        """Return the norm to scale down to, infinite without a spike, and update the statistics.

        A norm z standard deviations above the mean, z > d = `deviations`, is scaled to μ + d² σ / z: the farther out,
        the closer to the mean. decay: a; first: number of steps whose mean and variance are exact and where nothing is
        scaled.
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
class LossScale:
    """Scale of the loss in fp16. good: steps without overflow since it last changed."""

    value: float
    good: int = 0

    def overflowed(self) -> None:
        self.value, self.good = max(self.value / 2, 1.0), 0

    def worked(self, interval: int) -> None:
        self.good += 1
        if self.good >= interval:
            self.value, self.good = min(self.value * 2, LARGEST_SCALE), 0


LARGEST_ERROR: Final = 0.2  # of a divergence, as a share of its target, that adapts its weight


@define
class KlWeight:
    """Weight of the divergence from a reference in a policy loss."""

    value: float

    def adapt(self, divergence: float, target: float, gain: float) -> None:
        """Move the weight toward a divergence of `target` (Ziegler et al. 2019, arXiv 1909.08593, section 2.2)."""
        error = min(max(divergence / target - 1, -LARGEST_ERROR), LARGEST_ERROR)
        self.value *= 1 + gain * error


@define
class Progress:
    """Progress of the run. `step` counts finished optimizer steps, `tokens` their positions.

    measured: metric, as `eval/web/loss` → (the step after which it was last measured, its value).
    """

    step: int = 0
    tokens: int = 0
    measured: dict[str, tuple[int, float]] = field(factory=dict)
    bad: BadSteps = field(factory=BadSteps)
    norms: NormStatistics = field(factory=NormStatistics)
    bad_tasks: dict[str, int] = field(factory=dict)
    """Task → number of steps in a row that left it out because its values were not finite."""
    kept: dict[str, dict[str, Any]] = field(factory=dict)
    """Id of a tick's node → its counters, as JSON, which checkpoints keep."""
    loss_scale: LossScale | None = None
    """None in a run without a scale of the loss, and before its first step."""
    kl_weight: KlWeight | None = None
    """None in a run whose weight is not adapted, and before its first step."""
    over: str = ""
    """Reason to finish the run before the end of its budget, alike on all ranks; empty: none."""

    def counters(self) -> dict[str, Any]:
        """Return the counters that a checkpoint saves, as JSON."""
        norms = {"gradient_norms": asdict(self.norms)} if self.norms.count else {}
        tasks = {"bad_tasks": dict(self.bad_tasks)} if any(self.bad_tasks.values()) else {}
        kept = {"kept": {node: dict(counters) for node, counters in self.kept.items()}} if self.kept else {}
        scale = {"loss_scale": asdict(self.loss_scale)} if self.loss_scale is not None else {}
        weight = {"kl_weight": self.kl_weight.value} if self.kl_weight is not None else {}
        own = {**norms, **tasks, **kept, **scale, **weight}
        return {"step": self.step, "tokens": self.tokens, "nonfinite": self.bad.counters(), **own}

    def take(self, state: dict[str, Any]) -> None:
        """Resume from a checkpoint's counters; drops metrics measured after its step."""
        self.step, self.tokens = state["step"], state["tokens"]
        self.bad = BadSteps.of(state.get("nonfinite", {"last_good": self.step}))
        self.norms = NormStatistics(**state.get("gradient_norms", {}))
        self.bad_tasks = dict(state.get("bad_tasks", {}))
        self.loss_scale = LossScale(**state["loss_scale"]) if "loss_scale" in state else None
        self.kl_weight = KlWeight(state["kl_weight"]) if "kl_weight" in state else None
        self.kept = {node: dict(counters) for node, counters in state.get("kept", {}).items()}
        self.measured = {name: entry for name, entry in self.measured.items() if entry[0] <= self.step}
        self.measured |= {name: (self.step, value) for name, value in state.get("metrics", {}).items()}


Resources = dict[str, Any]


@define
class Clocks:
    """Clocks and questions that ranks agree on: one clock per period; the period of a question is infinite."""

    _periods: list[float] = field(factory=list)
    _heard: list[float] = field(factory=list)
    _last: list[float] = field(factory=list)
    _questions: dict[int, Callable[[], float]] = field(factory=dict)
    _everywhere: list[tuple[int, Callable[[], float]]] = field(factory=list)

    def add(self, seconds: float) -> int:
        """Return the number of the clock with this period. Actions with the same period share it and fall into the same
        steps."""
        return self._periods.index(seconds) if seconds in self._periods else self._new(seconds)

    def _new(self, seconds: float) -> int:
        self._periods.append(seconds)
        self._heard.append(0.0)
        self._last.append(time.monotonic())
        return len(self._periods) - 1

    def ask_for(self, question: Callable[[], float], *, everywhere: bool = False) -> int:
        """Register a question whose answer, 0 for no, goes to all ranks; returns its number.

        The first rank answers it; with `everywhere` all ranks do, and the sum goes to all.
        """
        number = self._new(float("inf"))
        if everywhere:
            self._everywhere.append((number, question))
        else:
            self._questions[number] = question
        return number

    def ask(self, *, first: bool, waiting: bool = False) -> list[float]:
        """Return this rank's contribution: 1 for each clock that has run out, and the answers to questions.

        waiting: report no clocks; they keep running.
        """
        answers = [0.0] * len(self._periods)
        if first and not waiting:
            now = time.monotonic()
            answers = [float(now - last >= period) for last, period in zip(self._last, self._periods, strict=True)]
        if first:
            for number, question in self._questions.items():
                answers[number] = float(question())
        for number, question in self._everywhere:
            answers[number] = float(question())
        return answers

    def answer(self, heard: list[float]) -> None:
        """Store the agreed values; clocks that ran out restart."""
        self._heard = heard
        for number, value in enumerate(heard):
            if value:
                self._last[number] = time.monotonic()

    def put_back(self) -> None:
        """Let the clocks of the last agreement run out again at the next one, because their actions were not done."""
        for number, value in enumerate(self._heard):
            if value and self._periods[number] != float("inf"):
                self._last[number] = float("-inf")

    def due(self, number: int) -> bool:
        """Return True if a clock ran out, or a question's answer was not 0, at the last agreement."""
        return self._heard[number] != 0

    def value(self, number: int) -> int:
        """Return the answer at the last agreement."""
        return int(self._heard[number])
