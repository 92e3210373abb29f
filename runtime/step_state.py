"""One optimizer step under way, and the exceptions that end a step or the loop."""

from collections.abc import Callable, Sequence
from typing import Any

from attrs import define, field
from torch import Tensor

from xtrain.runtime.data.collate.batch import Microbatch
from xtrain.runtime.data.collate.documents import DocumentSums
from xtrain.runtime.models.batch import ModelBatch, RowLosses
from xtrain.runtime.rollout.groups import SampledGroup


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
    groups: list[list[SampledGroup]] = field(factory=list)
    """What was sampled for each of its microbatches, in a run with rollouts."""
    sampled: bool = False
    """Whether that was in this step, by the weights as they are, and not for several steps in one before."""
    valid_tokens: int = 0
    units: int = 0
    """What the loss is divided by: valid tokens, sequences or pairs of all ranks."""
    documents: DocumentSums = field(factory=DocumentSums)
    loss_sums: Tensor | None = None
    """Cross-entropy, and behind it the objective where that is something else, of this rank."""
    row_losses: list[RowLosses] = field(factory=list)
    batches: list[ModelBatch] = field(factory=list)
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
