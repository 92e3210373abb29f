"""`step.hook`, `event.hook`: calls of the user's own hooks, and what they may give and change."""

from collections.abc import Callable
from typing import Any

from attrs import frozen
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from xtrain.dsl.user_parts.kinds import Kind
from xtrain.dsl.user_parts.places import GRADIENTS, IN_STEP, NOTHING, PARAMETERS
from xtrain.planner.plan import Plan
from xtrain.runtime.data.user_parts import UserPart, failures_of, part_of, spec_folder
from xtrain.runtime.hooks.context import RunContext
from xtrain.runtime.input.feed import Feed
from xtrain.runtime.models.parts import ModelParts
from xtrain.runtime.ops import op
from xtrain.runtime.reporting.records import Records
from xtrain.runtime.state import Progress, Rank, Resources
from xtrain.runtime.step_state import Step, StepCall

STEP = "in place of the forward and backward"
# Places at which the step in which a hook is called has not ended.
_UNDER_WAY = (STEP, *(place for place in IN_STEP if place != "after_phase"))


@frozen(kw_only=True, eq=False)
class HookCall:
    """One function of a plan that is called with a `RunContext`, loaded. metrics: what their names begin with.

    Raises PartFailed for what its code raises, gives or changes against its words."""

    metrics: str
    part: UserPart
    function: Callable[..., Any]
    place: str
    changes: str
    plan: Plan
    model: ModelParts
    optimizer: Optimizer
    feed: Feed
    rank: Rank
    records: Records
    progress: Progress
    resources: Resources

    @classmethod
    def of(
        cls,
        kind: Kind,
        plan: Plan,
        user: dict[str, Any],
        resources: Resources,
        *,
        place: str,
        changes: str = NOTHING,
        name: str = "",
    ) -> "HookCall":
        """A function of a kind with what it needs of the run. name: in those of its metrics; else its own."""
        part = part_of(kind, user, spec_folder(plan.spec))
        needed = {each: resources[each] for each in ("model", "optimizer", "feed", "rank", "records", "progress")}
        return cls(
            metrics=f"{kind}/{name or part.function}",
            part=part,
            function=part.load(),
            place=place,
            changes=changes,
            plan=plan,
            resources=resources,
            **needed,
        )

    def __call__(self, step: Step, *, failure: BaseException | None = None, status: str = "") -> None:
        before = _versions(self.model)
        with failures_of(self.part):
            given = self.function(self.context(step, failure, status), **self.part.arguments)
        after = _versions(self.model)
        for number, what in enumerate((PARAMETERS, GRADIENTS)):
            if what != self.changes and before[number] != after[number]:
                own = "that it changes " + (self.changes if self.changes != NOTHING else "nothing")
                raise self.part.failed(f"changed {what} {self.place}, and its declaration says {own}")
        self.record(given, step.index + 1 if self.place in _UNDER_WAY else self.progress.step)

    def _lr(self, step: Step) -> float:
        """The learning rate of a step that has not set it yet; 0 before there is a schedule."""
        schedule = self.resources.get("schedule")
        return 0.0 if schedule is None or self.feed.batch is None else schedule(step.index)

    def context(self, step: Step, failure: BaseException | None = None, status: str = "") -> RunContext:
        """What the function gets to see."""
        progress = self.progress
        return RunContext(
            place=self.place,
            step=step.index + 1 if self.place in _UNDER_WAY else progress.step,
            total=self.feed.steps,
            epoch=self.feed.epoch(progress.step) or 0.0,
            tokens=progress.tokens,
            phase=step.phase or self.feed.phase(step.index).name,
            rows=tuple(step.microbatches),
            valid_tokens=step.valid_tokens,
            loss=step.loss,
            objective=step.objective,
            grad_norm=step.grad_norm,
            lr=step.lr or (self._lr(step) if failure is None else 0.0),
            measured={name: value for name, (_, value) in progress.measured.items()},
            model=self.model,
            optimizer=self.optimizer,
            rank=self.rank,
            plan=self.plan,
            failure=failure,
            status=status,
            resources=self.resources,
        )

    def record(self, given: Any, at: int) -> None:
        """What the function has returned, as metrics of the state after `at` steps."""
        if given is not None:
            found = self._metrics(given)
            self.records.measured(found)
            # One that decides about the best checkpoint is of the state that is saved in this step.
            self.progress.measured |= {name: (at, value) for name, value in found.items()}

    def _metrics(self, given: Any) -> dict[str, float]:
        if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
            raise self.part.failed(f"returned {type(given).__name__}, and metrics are a dict of numbers by their names")
        found: dict[str, float] = {}
        for name, value in given.items():
            try:
                found[f"{self.metrics}/{name}"] = float(value)
            except (TypeError, ValueError):
                message = f"gave {type(value).__name__} as the metric `{name}`, and a metric is a number"
                raise self.part.failed(message) from None
        return found


@op("event.hook")
def event_hook(
    plan: Plan,
    node_id: str,
    user: dict[str, Any],
    place: str,
    changes: str,
    resources: Resources,
    nodes: list[str] | None = None,
) -> HookCall:
    """A hook outside of steps. nodes: around which the run calls it."""
    name = node_id.partition(".")[2]
    return HookCall.of("hook", plan, user, resources, place=place, changes=changes, name=name)


@op("step.hook")
def step_hook(
    plan: Plan, node_id: str, user: dict[str, Any], place: str, changes: str, feed: Feed, resources: Resources
) -> StepCall:
    """A hook in every step, or where a phase begins or has ended."""
    call = event_hook(plan, node_id, user, place, changes, resources)
    if place == "before_phase":
        return lambda step: call(step) if _begins(feed, step.index) else None
    if place == "after_phase":
        # Behind its last step, which is known for sure when the next phase begins; the run calls that of the last one.
        return lambda step: call(_before(step, feed)) if step.index and _begins(feed, step.index) else None
    return call


def _begins(feed: Feed, index: int) -> bool:
    """Whether a step is the first one of its phase."""
    return index == 0 or feed.phase(index).name != feed.phase(index - 1).name


def _before(step: Step, feed: Feed) -> Step:
    """The step before, of which only the phase is known."""
    return Step(index=step.index - 1, phase=feed.phase(step.index - 1).name)


def _versions(model: ModelParts) -> tuple[list[int], list[tuple[int, int]]]:
    """How often parameters have been written to, and gradients; writes through `.data` are not seen."""
    parameters = [_local(parameter)._version for parameter in model.parameters()]
    gradients = [
        (0, 0) if parameter.grad is None else (id(parameter.grad), _local(parameter.grad)._version)
        for parameter in model.parameters()
    ]
    return parameters, gradients


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
