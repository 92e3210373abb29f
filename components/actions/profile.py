"""`profile { active = 3 }`: time of each operation in a step."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from xtrain.contracts.actions import PlannedAction
from xtrain.dsl.schema.actions import ACTIONS, Action
from xtrain.dsl.schema.setting import Auto, between, cadence_setting, not_negative
from xtrain.dsl.spec import Spec
from xtrain.lazy_attrs import frozen
from xtrain.plan.graph import ActionNode, ActionPlace, RecordedRanks, ranks_setting
from xtrain.text.units import plural

if TYPE_CHECKING:
    from xtrain.plan.resolved import Resolved


@ACTIONS.register()
@frozen
class ProfileAction(PlannedAction):
    """`profile { active = 3 }`: time every operation of some steps, into a trace and a summary of each rank."""

    kind: ClassVar[str] = "profile"
    writes_beside = True

    wait: int = cadence_setting(
        "steps to skip first, so that other actions of the same tick have finished", default=1, check=not_negative
    )
    warmup: int = cadence_setting(
        "steps profiled and discarded after that, because the profiler is slow at first", default=1, check=not_negative
    )
    active: int = cadence_setting("steps to record", default=3, check=between(1, 100))
    ranks: int | Literal["first", "all"] | Auto = ranks_setting("are recorded")
    shapes: bool = cadence_setting("also record the shapes of the inputs of operations", default=False)
    stacks: bool = cadence_setting(
        "also record Python stack traces; traces become several times as large", default=False
    )
    memory: bool = cadence_setting("also record allocations and frees", default=False)

    def node(self, resolved: "Resolved", place: ActionPlace) -> ActionNode:
        """Return the plan node. A profile requested from outside gets its number of steps with the request."""
        recorded = RecordedRanks.of(self.ranks, resolved)
        args = {"ranks": recorded.ranks, "shapes": self.shapes, "stacks": self.stacks, "memory": self.memory}
        more = [name for name in ("shapes", "stacks", "memory") if getattr(self, name)]
        beside = f", with {' and '.join(more)}" if more else ""
        does = f"profile {{}} on {recorded.text}{beside}: a trace and a summary of each"
        if place.asked:
            behind = f", after {self.warmup} for warm-up," if self.warmup else ""
            steps = f"the requested number of steps{behind}"
            return ActionNode("event.profile", {"warmup": self.warmup, **args}, does.format(steps))
        schedule = {"wait": self.wait, "warmup": self.warmup, "active": self.active}
        return ActionNode("tick.profile", schedule | args, does.format(self._steps()))

    def _steps(self) -> str:
        """Return the steps in words, such as `3 steps, after 1 that passes and 1 to warm up`."""
        before = [f"{self.wait} skipped"] if self.wait else []
        before += [f"{self.warmup} for warm-up"] if self.warmup else []
        return plural(self.active, "step") + (f", after {' and '.join(before)}," if before else "")

    @classmethod
    def commands(
        cls, declared: Sequence[Action], spec: Spec, training: tuple[str, ...]
    ) -> Iterator[tuple[str, Action, str]]:
        """Yield the profile that the spec declares first; otherwise the default one."""
        yield "profile", next((action for action in declared if isinstance(action, cls)), cls()), "steps"

    def length(self, spec: Spec) -> int:
        return self.wait + self.warmup + self.active

    def needs_steps(self) -> tuple[str, str]:
        return "profile", "remove it"

    @classmethod
    def unrecorded(cls, args: Mapping[str, Any]) -> int:
        return args["wait"] + args["warmup"]
