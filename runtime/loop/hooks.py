"""Functions of a user in a run: hooks (`step.hook`, `event.hook`), and bodies of a step or an evaluation."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor
from torch.optim import Optimizer

from xtrain.dsl.user_parts.kinds import AROUND_LOSS, GRADIENTS, IN_STEP, NOTHING, PARAMETERS, Kind
from xtrain.plan.plan import Plan
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Progress, Rank, Resources
from xtrain.runtime.base.user_parts import UserPart, failures_of, part_of, spec_folder
from xtrain.runtime.feed.microbatch import Microbatch
from xtrain.runtime.feed.setup import Feed
from xtrain.runtime.nn.axes import own_part
from xtrain.runtime.nn.batch import ModelBatch, Step, StepCall
from xtrain.runtime.nn.pipeline import WrappedModel
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.observe.heartbeat import HeartbeatWriter
from xtrain.runtime.observe.records import Records


@frozen(kw_only=True)
class RunContext:
    """State of a run when a hook is called.

    place: of the hook. step: number of the running step, from 1; outside of steps, of the last finished one. total:
    steps of the whole run. epoch: epochs of data read so far. tokens: positions of the earlier steps. phase: its name.
    rows: the microbatches of this rank; empty outside of a step and on ranks that read none; around the loss only that
    microbatch. valid_tokens: of the step on all ranks, 0 before they are counted. loss: mean over these tokens, and
    grad_norm, before clipping: NaN until they are summed over ranks, after `after_backward`; in `after_loss` the mean
    over the valid tokens of that microbatch on this rank, NaN without any. objective: mean of the objective; None until
    then, and if it is the cross-entropy. lr: of the step, also before the optimizer has it. measured: metric → value of
    the latest evaluations, as `eval/web/loss`. model: this rank's part of the model: `named_parameters()`, with names
    of the whole model, and `parts`; a RuntimeError `before_init`, as for optimizer. failure: the error that ended the
    run, only in `at_failure` and `on failure`. status: how the run ended, only in `at_end`. resources: name → other
    results of plan nodes, which may change between versions.
    """

    place: str
    step: int
    total: int
    epoch: float
    tokens: int
    phase: str
    rows: tuple[Microbatch, ...]
    valid_tokens: int
    loss: float
    objective: float | None
    grad_norm: float
    lr: float
    measured: Mapping[str, float]
    _model: ModelParts | None = field(alias="model")
    _optimizer: Optimizer | None = field(alias="optimizer")
    rank: Rank
    plan: Plan
    failure: BaseException | None
    status: str
    resources: Mapping[str, Any]

    @property
    def model(self) -> ModelParts:
        return self._built(self._model, "model")

    @property
    def optimizer(self) -> Optimizer:
        return self._built(self._optimizer, "optimizer")

    def _built(self, resource: Any, name: str) -> Any:
        if resource is None:
            raise RuntimeError(f"there is no {name} {self.place}")
        return resource

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""
        return self.rank.device


STEP = "in place of the forward and backward"
# Places before the first step of a start.
_NO_RECORD = ("before_init", "after_init", "before_train")
# Places inside the running step.
_UNDER_WAY = (STEP, *AROUND_LOSS, *(place for place in IN_STEP if place not in ("after_phase", "after_epoch")))


@frozen(kw_only=True, eq=False)
class HookCall:
    """A loaded user function that is called with a `RunContext`. metrics: prefix of its metrics' names.

    Raises PartFailed if the function raises, returns an invalid value, or changes tensors against its declaration.
    """

    metrics: str
    part: UserPart
    function: Callable[..., Any]
    place: str
    changes: str
    plan: Plan
    model: ModelParts | None
    optimizer: Optimizer | None
    feed: Feed | None
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
        """Load a function and take its resources from the run. name: for its metrics; default: the function's name."""
        part = part_of(kind, user, spec_folder(plan.spec))
        needed = {resource: resources[resource] for resource in ("rank", "records", "progress")}
        needed |= {resource: resources.get(resource) for resource in ("model", "optimizer", "feed")}
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
                raise self.part.failed(f"changed {what} {self.place}, but its declaration says {own}")
        self.record(given, step.index + 1 if self.place in _UNDER_WAY else self.progress.step)

    def _lr(self, step: Step) -> float:
        """Return the learning rate of a step that has not set it yet; 0 before there is a schedule."""
        schedule = self.resources.get("schedule")
        return 0.0 if schedule is None or self.feed is None or self.feed.batch is None else schedule(step.index)

    def context(self, step: Step, failure: BaseException | None = None, status: str = "") -> RunContext:
        """Return the context for the function."""
        progress, feed = self.progress, self.feed
        return RunContext(
            place=self.place,
            step=step.index + 1 if self.place in _UNDER_WAY else progress.step,
            total=0 if feed is None else feed.steps,
            epoch=0.0 if feed is None else feed.epoch(progress.step) or 0.0,
            tokens=progress.tokens,
            phase=step.phase or ("" if feed is None else feed.phase(step.index).name),
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
        """Record the returned metrics for the state after `at` steps."""
        if given is not None:
            if self.place in _NO_RECORD:
                raise self.part.failed(f"returned metrics {self.place}, where no step has a record yet")
            metrics = self._metrics(given)
            self.records.measured(metrics)
            # A metric that decides about the best checkpoint belongs to the state saved in this step.
            self.progress.measured |= {name: (at, value) for name, value in metrics.items()}

    def _metrics(self, given: Any) -> dict[str, float]:
        if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
            raise self.part.failed(f"returned {type(given).__name__}; metrics must be a dict of numbers by name")
        metrics: dict[str, float] = {}
        for name, value in given.items():
            try:
                metrics[f"{self.metrics}/{name}"] = float(value)
            except (TypeError, ValueError):
                message = f"gave {type(value).__name__} as the metric `{name}`; a metric must be a number"
                raise self.part.failed(message) from None
        return metrics


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
    """Create a hook outside of steps. nodes: the nodes around which it is called."""
    name = node_id.partition(".")[2]
    return HookCall.of("hook", plan, user, resources, place=place, changes=changes, name=name)


@op("step.hook", traced=False)
def step_hook(
    plan: Plan, node_id: str, user: dict[str, Any], place: str, changes: str, feed: Feed, resources: Resources
) -> StepCall:
    """Create a hook of every step, or of the start or end of a phase."""
    call = event_hook(plan, node_id, user, place, changes, resources)
    when, _, what = place.partition("_")
    if what not in ("phase", "epoch"):
        return call
    begins = feed.begins_epoch if what == "epoch" else feed.begins_phase
    if when == "before":
        return lambda step: call(step) if begins(step.index) else None
    # The end of a phase is certain only when the next one begins; the loop calls the hook of the last phase.
    return lambda step: call(_before(step, feed)) if step.index and begins(step.index) else None


def _before(step: Step, feed: Feed) -> Step:
    """Return the previous step, of which only the phase is known."""
    return Step(index=step.index - 1, phase=feed.phase(step.index - 1).name)


@frozen(kw_only=True, eq=False)
class LossHooks:
    """Hooks around the forward of each microbatch, by place."""

    calls: Mapping[str, Sequence[HookCall]]

    @classmethod
    def of(cls, plan: Plan, resources: Resources) -> "LossHooks":
        nodes = [node for node in plan.nodes if node.op == "event.hook"]
        return cls(
            calls={
                place: [
                    event_hook(plan, node.id, node.args["user"], place, node.args["changes"], resources)
                    for node in nodes
                    if node.args["place"] == place
                ]
                for place in AROUND_LOSS
            }
        )

    def forward(
        self, forward: Callable[[None, ModelBatch], Tensor], batch: ModelBatch, microbatch: Microbatch, step: Step
    ) -> Tensor:
        """Return the objective of a microbatch, and call the hooks before and after its forward."""
        self._call("before_loss", step, microbatch, float("nan"))
        objective = forward(None, batch)
        if self.calls["after_loss"]:
            valid = microbatch.num_valid
            loss = float(batch.cross_entropy.detach()) / valid if valid and batch.cross_entropy is not None else None
            self._call("after_loss", step, microbatch, float("nan") if loss is None else loss)
        return objective

    def _call(self, place: str, step: Step, microbatch: Microbatch, loss: float) -> None:
        for call in self.calls[place]:
            call(evolve(step, microbatches=[microbatch], loss=loss))


def _versions(model: ModelParts | None) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the version counters of parameters and gradients; writes through `.data` are not seen."""
    if model is None:
        return [], []
    parameters = [own_part(parameter)._version for parameter in model.parameters()]
    gradients = [
        (0, 0) if parameter.grad is None else (id(parameter.grad), own_part(parameter.grad)._version)
        for parameter in model.parameters()
    ]
    return parameters, gradients


@define(kw_only=True, eq=False)
class StepContext:
    """Argument of a function that replaces a step.

    batches: the microbatches of this rank, each once, in order; gradients are summed over ranks in the backward of the
    last one. scale: factor of losses before their backward: 1 / the valid tokens of the step on all ranks, or its
    sequences or pairs if the loss is per sequence or pair; 1 in evaluations. run: the RunContext.
    """

    batches: Iterator[ModelBatch]
    scale: float
    run: RunContext
    _whole: Callable[[None, ModelBatch], Tensor] = field(alias="whole")
    _first: dict[int, ModelBatch] = field(factory=dict)
    _losses: list[Tensor] = field(factory=list)
    _rows: list[Any] = field(factory=list)

    def forward(self, batch: ModelBatch) -> Tensor:
        """Return the loss of a microbatch, summed over the valid tokens of this rank (a scalar tensor). In evaluations
        the cross-entropy; with a reward head the loss itself.

        The loss of the first forward of each microbatch is recorded.
        """
        objective = self._whole(None, batch).sum()
        if not torch.is_grad_enabled():
            assert batch.cross_entropy is not None
            return batch.cross_entropy
        if id(batch) not in self._first:
            self._first[id(batch)] = batch
            self._losses.append(batch.sums)
            self._rows += [batch.row_losses] if batch.row_losses is not None else []
        return objective


@op("step.body")
def user_body(
    plan: Plan,
    user: dict[str, Any],
    model: ModelParts,
    rank: Rank,
    accumulate: int,
    sync: str,
    resources: Resources,
    wrapped: WrappedModel | None = None,
    beat: HeartbeatWriter | None = None,
) -> StepCall:
    """Call the function with the microbatches of each step. Raises PartFailed if it leaves out some of them."""
    wrapped = wrapped or WrappedModel.of(model)
    call = HookCall.of("step", plan, user, resources, place=STEP)

    def batches(step: Step) -> Iterator[ModelBatch]:
        for number, microbatch in enumerate(step.microbatches, start=1):
            wrapped.sync_gradients(number == len(step.microbatches) or sync == "microbatch")
            if beat is not None:
                beat.mark()
            yield ModelBatch.of(microbatch, rank.device)

    def call_step_function(step: Step) -> None:
        assert 1 <= len(step.microbatches) <= accumulate
        given, scale = batches(step), 1.0 / step.units
        context = StepContext(batches=given, scale=scale, run=call.context(step), whole=wrapped.forward)
        with failures_of(call.part):
            metrics = call.function(context, **call.part.arguments)
        if len(context._losses) != len(step.microbatches) or next(given, None) is not None:
            taken = f"{len(context._losses)} of {len(step.microbatches)} microbatches"
            raise call.part.failed(f"called `context.forward` of {taken}; a step must use all of `context.batches`")
        step.loss_sums = torch.stack(context._losses).sum(0)
        step.row_losses = context._rows
        call.record(metrics, step.index + 1)

    return call_step_function


def evaluation_body(
    plan: Plan, user: dict[str, Any], resources: Resources
) -> Callable[[Step, Iterator[ModelBatch]], float]:
    """Return the function that replaces an evaluation's forward; it returns the sum of losses over the rank's valid
    tokens."""
    place = "in place of the forward of an evaluation"
    call = HookCall.of("evaluation_step", plan, user, resources, place=place)

    def call_evaluation_function(step: Step, batches: Iterator[ModelBatch]) -> float:
        assert call.model is not None
        context = StepContext(batches=batches, scale=1.0, run=call.context(step), whole=call.model.whole)
        with failures_of(call.part):
            loss_sum = call.function(context, **call.part.arguments)
        if next(batches, None) is not None:
            raise call.part.failed("left out microbatches; an evaluation must use all of `context.batches`")
        try:
            return float(loss_sum)
        except (TypeError, ValueError):
            kind = type(loss_sum).__name__
            raise call.part.failed(f"returned {kind}; the sum of losses must be a number") from None

    return call_evaluation_function
