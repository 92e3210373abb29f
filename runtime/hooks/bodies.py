"""`step.body`: functions of the user's own in place of the forward and backward of a step, or of an evaluation."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from xtrain.planner.plan import Plan
from xtrain.runtime.data.user_parts import failures_of
from xtrain.runtime.hooks.calls import STEP, HookCall
from xtrain.runtime.hooks.context import RunContext
from xtrain.runtime.models.batch import ModelBatch
from xtrain.runtime.models.parts import ModelParts
from xtrain.runtime.monitoring.heartbeat import HeartbeatWriter
from xtrain.runtime.ops import op
from xtrain.runtime.parallelize.wrapped import WrappedModel
from xtrain.runtime.state import Rank, Resources
from xtrain.runtime.step_state import Step, StepCall


@define(kw_only=True, eq=False)
class StepContext:
    """What a function in place of a step gets.

    batches: the microbatches of this rank, each once, in their order; gradients are summed over ranks in the backward
    of the last one. scale: what losses are multiplied with before their backward: 1 / the valid tokens of the step on
    all ranks, or its sequences or pairs where the loss is of these; 1 in evaluations. run: all else.
    """

    batches: Iterator[ModelBatch]
    scale: float
    run: RunContext
    _whole: Callable[[None, ModelBatch], Tensor] = field(alias="whole")
    _first: dict[int, ModelBatch] = field(factory=dict)
    _losses: list[Tensor] = field(factory=list)
    _rows: list[Any] = field(factory=list)

    def forward(self, batch: ModelBatch) -> Tensor:
        """The loss of a microbatch, summed over the valid tokens that this rank holds: a tensor without dimensions. In
        evaluations the cross-entropy; with a head of rewards the loss itself.

        Of the first forward of each microbatch the loss is recorded.
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
    """Call the function with the microbatches of each step. Raises PartFailed where it leaves some of them out."""
    wrapped = wrapped or WrappedModel.of(model)
    call = HookCall.of("step", plan, user, resources, place=STEP)

    def batches(step: Step) -> Iterator[ModelBatch]:
        for number, microbatch in enumerate(step.microbatches, start=1):
            wrapped.sync_gradients(number == len(step.microbatches) or sync == "microbatch")
            if beat is not None:
                beat.mark()
            yield ModelBatch.of(microbatch, rank.device)

    def run(step: Step) -> None:
        assert 1 <= len(step.microbatches) <= accumulate
        given, scale = batches(step), 1.0 / step.units
        context = StepContext(batches=given, scale=scale, run=call.context(step), whole=wrapped.forward)
        with failures_of(call.part):
            found = call.function(context, **call.part.arguments)
        if len(context._losses) != len(step.microbatches) or next(given, None) is not None:
            taken = f"{len(context._losses)} of {len(step.microbatches)} microbatches"
            raise call.part.failed(
                f"has called `context.forward` of {taken}, and a step takes all of `context.batches`"
            )
        step.loss_sums = torch.stack(context._losses).sum(0)
        step.row_losses = context._rows
        call.record(found, step.index + 1)

    return run


def evaluation_body(
    plan: Plan, user: dict[str, Any], resources: Resources
) -> Callable[[Step, Iterator[ModelBatch]], float]:
    """The function in place of the forward of evaluations: its sum of losses over the valid tokens of a rank."""
    place = "in place of the forward of an evaluation"
    call = HookCall.of("evaluation_step", plan, user, resources, place=place)

    def run(step: Step, batches: Iterator[ModelBatch]) -> float:
        context = StepContext(batches=batches, scale=1.0, run=call.context(step), whole=call.model.whole)
        with failures_of(call.part):
            found = call.function(context, **call.part.arguments)
        if next(batches, None) is not None:
            raise call.part.failed("has left out microbatches, and an evaluation takes all of `context.batches`")
        try:
            return float(found)
        except (TypeError, ValueError):
            kind = type(found).__name__
            raise call.part.failed(f"returned {kind}, and the sum of losses is a number") from None

    return run
