"""`early_stop { metric = eval.web.loss }`: finish the run when a metric no longer improves."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from xtrain.contracts.actions import PlannedAction
from xtrain.dsl.schema.actions import ACTIONS, TURN_OF_LOG, Action
from xtrain.dsl.schema.setting import at_least, cadence_setting
from xtrain.dsl.values import MeasuredNumber
from xtrain.lazy_attrs import frozen
from xtrain.plan.graph import ActionNode, ActionPlace
from xtrain.text.units import plural

if TYPE_CHECKING:
    from xtrain.plan.resolved import Resolved


@ACTIONS.register()
@frozen
class EarlyStop(PlannedAction):
    """`early_stop { metric = eval.web.loss }`: finish the run when `metric` has not improved in `patience` measurements
    in a row.

    The run then ends as at the end of its budget, with the actions of `on finish`. Checkpoints keep the best value and
    the number of measurements since then, so a resumed run finishes at the same step.
    """

    kind: ClassVar[str] = "early_stop"
    example: ClassVar[str] = "every 100 steps eval text then {}"
    turn = TURN_OF_LOG  # after the evaluations of its step

    metric: MeasuredNumber = cadence_setting(
        "metric of an evaluation or a hook; only values measured in the same step count", example="eval.text.loss"
    )
    patience: int = cadence_setting(
        "consecutive measurements without improvement after which the run finishes", default=3, check=at_least(1)
    )
    least: float = cadence_setting(
        "smallest change that counts as an improvement, in the unit of the metric", default=0.0, check=at_least(0)
    )
    metric_is: Literal["auto", "lowest", "highest"] = cadence_setting(
        "better value of `metric`; auto: lowest for losses, highest for accuracies and rewards, unknown for others",
        default="auto",
    )

    def node(self, resolved: "Resolved", place: ActionPlace) -> ActionNode:
        highest = "highest" in (self.metric_is, self.metric.better if self.metric_is == "auto" else None)
        by = f" by more than {self.least:g}" if self.least else ""
        does = (
            f"finish the run after {plural(self.patience, 'measurement')} in a row in which {self.metric} was not "
            f"{'above' if highest else 'below'} its {'highest' if highest else 'lowest'} value{by}"
        )
        args = {"metric": self.metric.key, "patience": self.patience, "least": self.least, "highest": highest}
        return ActionNode("tick.early_stop", args, does)

    def awaits(self) -> tuple[MeasuredNumber, str]:
        return self.metric, self.metric_is

    def misplaced(self, event: str, following: Sequence[Action]) -> tuple[str, str] | None:
        if not event:
            return None
        message = f"on {event} has the action early_stop, but it counts measurements that are taken periodically"
        return message, "write `every 500 steps eval DATASET then early_stop { … }`"
