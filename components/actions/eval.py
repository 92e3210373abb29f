"""`eval DATASET { … }`: the loss on held-out documents."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import frozen

from ...dsl.schema.actions import ACTIONS, Action
from ...dsl.schema.setting import AUTO, Auto, Role, at_least, setting
from ...dsl.spec import Spec
from ...planner.graph.action_node import ActionNode, ActionPlace, averaged_weights
from ...planner.units import plural

if TYPE_CHECKING:
    from ...planner.resolved import Resolved


@ACTIONS.register()
@frozen
class Eval(Action):
    """`eval DATASET { … }`: loss on the held-out part of a dataset."""

    kind: ClassVar[str] = "eval"
    records = True
    uses_averages = True
    hooked = "evaluation"
    metrics: ClassVar = {
        "eval/NAME/loss": ("loss on the held-out part of dataset NAME, after this step", "nats a token")
    }

    dataset: str
    batches: int | Auto | None = setting(
        "batches to evaluate, each of the rows of a step; auto: steps // 20, at least 1; none: the whole hold-out",
        default=AUTO,
        check=at_least(1),
        role=Role.CADENCE,
    )

    def node(self, run: "Resolved", place: ActionPlace) -> ActionNode:
        batches = self._batches(run.batch.steps)
        # Counted in the rows of a step, not of a microbatch: every layout then evaluates the same rows.
        rows = None if batches is None else batches * run.batch.rows
        reach = "the whole hold-out" if rows is None else f"its first {plural(rows, 'row')}"
        averaged, of = averaged_weights(run)
        body = run.spec.evaluation_step
        by = f", by {body.function} of {body.module}" if body else ""
        return ActionNode(
            "tick.eval",
            {"dataset": self.dataset, "rows": rows, **averaged, **({"user": body.call()} if body else {})},
            f"loss on what {self.dataset} held out: {reach}{of}{by}",
            name=f"tick.eval.{self.dataset}",
            after=((f"setup.data.{self.dataset}", "held-out rows"),),
        )

    def _batches(self, steps: int | None) -> int | None:
        """`auto` is a twentieth of the steps, at least 1; the whole hold-out (None) while the steps are not known."""
        if not isinstance(self.batches, Auto):
            return self.batches
        return None if steps is None else max(steps // 20, 1)

    @classmethod
    def commands(
        cls, declared: Sequence[Action], spec: Spec, training: tuple[str, ...]
    ) -> Iterator[tuple[str, Action, str]]:
        """An evaluation of each dataset that is trained on or evaluated and holds something out: the one that the spec
        declares first, so that losses can be compared; else the usual one."""
        evaluated = (name for action in declared if (name := action.held_out()) is not None)
        for name in dict.fromkeys((*training, *evaluated)):
            if spec.datasets[name].holdout.value:
                own = (action for action in declared if isinstance(action, cls) and action.dataset == name)
                yield f"eval {name}", next(own, cls(dataset=name)), ""

    @classmethod
    def shown(cls, args: Mapping[str, Any]) -> str:
        return f"eval {args['dataset']}"

    def held_out(self) -> str:
        return self.dataset
