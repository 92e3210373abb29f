"""What ops share while a plan runs: who this rank is, how far the run has come, and the step under way."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import asdict, define, field, frozen
from torch import Tensor

from xtrain.runtime.data.collate.batch import Microbatch
from xtrain.runtime.data.collate.documents import DocumentSums
from xtrain.runtime.replica import ReplicaGroup

if TYPE_CHECKING:
    # A process that only reads needs no model.
    from xtrain.runtime.models.batch import ModelBatch, RowLosses
    from xtrain.runtime.rollout.groups import SampledGroup


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


@define(kw_only=True)
class Step:
    """One optimizer step under way. `index` counts from 0; sums are over valid tokens of all ranks once reduced."""

    index: int
    rows: int = 0
    """Those that it takes, on all ranks, of replica groups those that take part."""
    share: float = 1.0
    """Its rows as a share of those of a step behind the ramp."""
    phase: str = ""
    """The name of the phase that it lies in."""
    microbatches: list[Microbatch] = field(factory=list)
    groups: "list[list[SampledGroup]]" = field(factory=list)
    """What was sampled for each of its microbatches, in a run with rollouts."""
    sampled: bool = False
    """Whether that was in this step, by the weights as they are, and not for several steps in one before."""
    valid_tokens: int = 0
    units: int = 0
    """What the loss is divided by: valid tokens, sequences or pairs of all ranks."""
    documents: DocumentSums = field(factory=DocumentSums)
    loss_sums: Tensor | None = None
    """Cross-entropy, and behind it the objective where that is something else, of this rank."""
    row_losses: "list[RowLosses]" = field(factory=list)
    batches: "list[ModelBatch]" = field(factory=list)
    """Its microbatches with the cross-entropy of each token, where nodes behind the forward ask for them."""
    loss: float = float("nan")
    objective: float | None = None
    reward: float | None = None
    """Mean over the completions that it has sampled; None where it has sampled none."""
    metrics: dict[str, float] = field(factory=dict)
    """What its rollout measures, and its loss beside it: means over tokens, sequences or pairs; by name."""
    grad_norm: float = float("nan")
    clipped: float = 1.0
    """What its gradients were multiplied with."""
    task_norms: dict[str, float] = field(factory=dict)
    """The same as `grad_norm` of each of several tasks."""
    left_out: frozenset[str] = frozenset()
    """The tasks that do not learn from it."""
    lr: float = 0.0
    began: float = 0.0
    warms_up: bool = False
    """The first one that this start of the run has computed: it compiles and fills caches, and no average of times has
    it in."""
    waited: float = 0.0
    """Seconds this rank had waited for others, in all, when the step began."""
    data_seconds: float = 0.0
    stop: str = ""
    """Why the run is to stop behind it, as a tick has found on all ranks alike; empty: it need not."""
    taken: dict[str, Any] = field(factory=dict)
    """What its nodes have taken for the ticks behind it, by the op of the tick; dropped when these have run."""

    @property
    def minimised(self) -> float:
        """The loss that is minimised: the objective, or the cross-entropy where that is all."""
        return self.loss if self.objective is None else self.objective

    def record(self, measured: Sequence[str], sums: Sequence[float], count: int) -> None:
        """Take what was minimised and `measured` beside it, summed over all ranks; nothing where that is the loss.
        count: of how many tokens, sequences or pairs it was measured."""
        if sums:
            objective, *others = sums
            self.objective = objective / self.units
            self.metrics |= {name: total / count for name, total in zip(measured, others, strict=True)}

    def let_go(self) -> None:
        """Forget what it was computed of."""
        self.microbatches, self.loss_sums, self.row_losses = [], None, []
        self.groups, self.batches = [], []


StepCall = Callable[[Step], None]
"""What a node of the loop is once its op is bound: it runs on the step under way."""


class Halt(Exception):
    """All ranks have agreed to leave the loop before this step because of `event` (`sigterm`, `time_limit`, …).

    reason: what made it occur, as a sentence.
    """

    def __init__(self, event: str, reason: str) -> None:
        super().__init__(f"{event}: {reason}")
        self.event, self.reason = event, reason


class StepAgain(Exception):
    """Nothing was learned from this step, on no rank of this replica group: it begins anew, or the one does that the
    group has come to by the state of another one. moved: it has. agreed: ranks had agreed on what is due behind it."""

    def __init__(self, reason: str, *, moved: bool = False, agreed: bool = False) -> None:
        super().__init__(reason)
        self.moved, self.agreed = moved, agreed


class RunIsOver(Exception):
    """Others have come to the end of the run, and nothing is left to do."""


class SkipStep(Exception):
    """Nothing is learned from this step; it is counted and the next one follows. fields: of the event that says so."""

    def __init__(self, reason: str, **fields: Any) -> None:
        super().__init__(reason)
        self.fields = fields


class NonFinite(Exception):
    """The loss or the gradient norm is not a number, on all ranks alike, and in as many steps as the plan bears.

    `report`: what is to be said of it, where the numbers of this step are not all.
    """

    agreed = True

    def __init__(self, step: int, loss: float, grad_norm: float, report: str = "") -> None:
        super().__init__(report or f"step {step}: loss {loss}, gradient norm {grad_norm}")
        self.step, self.loss, self.grad_norm = step, loss, grad_norm


class NothingLearned(Exception):
    """So many steps in a row, or all that a run has made, had nothing to learn from, on all ranks alike."""

    agreed = True


Resources = dict[str, Any]
