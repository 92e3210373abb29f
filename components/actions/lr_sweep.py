"""`lr_sweep`, the plan of `xtrain find-lr`: the loss while the learning rate grows, and suggested rates.

Leslie Smith's range test (arXiv 1506.01186, section 3.3) with rates in geometric progression. The two suggestions
follow fastai: the rate of steepest descent, arg min of d loss / d log(rate), and a tenth of the rate with the least
loss.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import evolve

from xtrain.components.actions.skip import Skip
from xtrain.components.schedules.exponential import Exponential
from xtrain.contracts.actions import PlannedAction
from xtrain.dsl.schema.actions import ACTIONS, TURN_OF_LOG, OnEvent, Tick
from xtrain.dsl.schema.optimizers import ParameterGroup
from xtrain.dsl.schema.setting import at_least, proper_fraction, setting
from xtrain.dsl.spec import Origin, Spec
from xtrain.dsl.values import Quantity
from xtrain.lazy_attrs import frozen
from xtrain.plan.graph import ActionNode, ActionPlace

if TYPE_CHECKING:
    from xtrain.plan.resolved import Resolved

# Initial points excluded from the search for the steepest descent: their average has few losses.
SKIPPED_SHARE = 0.1
# Settings that a sweep overrides (OWN), and the ones among them that it sets (SET).
OWN = (
    "experiment.budget", "optimizer.lr", "scheduler", "batch.ramp", "phase", "every", "on", "ema", "checkpoint",
    "launch.stop_at", "launch.stop_after", "workspace.lineage", "workspace.run", "alerts.loss_spike",
)  # fmt: skip
SET = (
    "experiment.budget", "optimizer.lr", "scheduler.kind", "scheduler.start", "every.0", "every.0.every", "on.0",
    "on.0.event", "checkpoint.enabled", "checkpoint.resume", "workspace.lineage", "alerts.loss_spike",
)  # fmt: skip


@ACTIONS.register()
@frozen
class LrSweep(PlannedAction):
    """`lr_sweep { times = 4 }`: the tick of `xtrain find-lr` after every step: record loss and learning rate, stop the
    run when the loss diverges, and write `lr_sweep.json` with the suggested rates."""

    kind: ClassVar[str] = "lr_sweep"
    writes_beside = True
    example: ClassVar[str] = "every 1 step {}"
    turn = TURN_OF_LOG
    ends_at_bad = True

    times: float = setting(
        "stop the run when the smoothed loss is above this many times its minimum", default=4.0, check=at_least(1)
    )
    smoothing: float = setting("decay of the running average of the loss per step", default=0.9, check=proper_fraction)

    def node(self, resolved: "Resolved", place: ActionPlace) -> ActionNode:
        does = (
            f"record loss and learning rate; stop if the loss, smoothed by {self.smoothing:g}, is not finite or above "
            f"{self.times:g} times its minimum; at the end write lr_sweep.json with the steepest descent and minimum/10"
        )
        return ActionNode("tick.lr_sweep", {"times": self.times, "smoothing": self.smoothing}, does)


def swept(spec: Spec, *, low: float, high: float, steps: int) -> Spec:
    """Return the spec of a learning-rate sweep: `spec` with the rate growing from `low` to `high` in `steps` steps.
    Rates of groups grow in proportion. Drops phases, ramps, averages, checkpoints, loss-spike alerts, ticks and
    event actions."""
    name = spec.workspace.lineage or spec.experiment.name
    kept = {path: origin for path, origin in spec.origins.items() if not path.startswith(OWN)}
    groups = _scaled(spec.groups, high / spec.optimizer.lr)
    rates = (f"group.{group}.optimizer.lr" for group, each in groups.items() if each.optimizer is not None)
    origins = kept | dict.fromkeys((*SET, *rates), Origin("set"))
    return evolve(
        spec,
        experiment=evolve(spec.experiment, budget=Quantity(steps, "steps")),
        optimizer=evolve(spec.optimizer, lr=high),
        groups=groups,
        scheduler=evolve(Exponential(), start=low),
        batch=evolve(spec.batch, ramp_from=None),
        phases={},
        ema=None,
        ticks=(Tick(actions=(LrSweep(),), every=Quantity(1, "steps")),),
        events=(OnEvent(event="nan", actions=(Skip(),)),),
        checkpoint=evolve(spec.checkpoint, enabled=False, resume=False, from_=None, best=None),
        alerts=evolve(spec.alerts, loss_spike=None),
        launch=evolve(spec.launch, stop_at=None, stop_after=None),
        workspace=evolve(spec.workspace, lineage=f"{name}-find-lr", run=None),
        origins=origins,
    )


def _scaled(groups: dict[str, ParameterGroup], factor: float) -> dict[str, ParameterGroup]:
    """Scale the learning rates of groups with optimizers of their own by `factor`."""
    return {
        name: each
        if each.optimizer is None
        else evolve(each, optimizer=evolve(each.optimizer, lr=each.optimizer.lr * factor))
        for name, each in groups.items()
    }


@frozen
class RunningAverage:
    """Bias-corrected running average: s ← β · s + (1 − β) · loss, divided by 1 − βⁿ after n losses."""

    smoothing: float
    raw: float = 0.0
    count: int = 0

    def add(self, loss: float) -> "RunningAverage":
        """Return the average updated with one more loss."""
        return RunningAverage(self.smoothing, self.smoothing * self.raw + (1 - self.smoothing) * loss, self.count + 1)

    @property
    def value(self) -> float:
        return self.raw / (1 - self.smoothing**self.count)


def suggestions(rates: Sequence[float], smoothed: Sequence[float]) -> dict[str, float | None]:
    """Return `steepest` and `minimum_tenth` from the rates and smoothed losses of the steps; None if there are too few
    points or the loss never falls."""
    first = int(len(rates) * SKIPPED_SHARE)
    least = min(range(len(smoothed)), key=smoothed.__getitem__, default=0)
    slopes = {
        place: (smoothed[place + 1] - smoothed[place]) / math.log(rates[place + 1] / rates[place])
        for place in range(first, least)
    }
    steepest = min(slopes, key=slopes.__getitem__, default=None)
    falls = steepest is not None and slopes[steepest] < 0
    return {
        "steepest": rates[steepest] if steepest is not None and falls else None,
        "minimum_tenth": rates[least] / 10 if falls else None,
    }


def result(points: Sequence[tuple[float, float]], smoothing: float) -> dict[str, Any]:
    """Return the sweep's result from the (rate, loss) of each step: both, smoothed losses and suggestions."""
    average, smoothed = RunningAverage(smoothing), []
    for _, loss in points:
        average = average.add(loss)
        smoothed.append(average.value)
    rates = [rate for rate, _ in points]
    return {
        "lr": rates,
        "loss": [loss for _, loss in points],
        "smoothed": smoothed,
        "smoothing": smoothing,
        **suggestions(rates, smoothed),
    }
