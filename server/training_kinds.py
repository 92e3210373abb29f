"""`forward_backward` and `optim_step`: what changes a model."""

from collections.abc import Iterator, Sequence
from typing import Any

from .checks import rows_of
from .engine import TARGETS, Adam, Pass, UserError
from .entries import Accepted, Change
from .kinds import Kind, SingleKind, fail, finish, finite, numbered
from .messages import MEDIA_TYPE, ForwardBackward, forward_backward_output, read_forward_backward
from .models_in_memory import ModelDamaged, ModelsInMemory
from .requests import OptimStep, read_json
from .state import QueuedWork, WorkDone


class ForwardBackwardKind(Kind):
    """A pass over the rows of a model; `forward_only` leaves no gradient. Passes of several models are one call."""

    name = "forward_backward"
    media = MEDIA_TYPE
    together = 1024

    def read(self, raw: bytes) -> ForwardBackward:
        return read_forward_backward(raw)

    def address(self, request: ForwardBackward) -> tuple[str, int]:
        return request.model_id, numbered(request.seq_id)

    def run(self, works: Sequence[QueuedWork], memory: ModelsInMemory) -> None:
        for group in _groups(works, memory):
            models = [work.entry.queue for work in group]
            ready: list[tuple[QueuedWork, Pass]] = []
            for work in group:
                try:
                    one = _pass(work.request, memory)
                    memory.need(one.model, keep=models)
                    ready.append((work, one))
                except (UserError, ModelDamaged) as error:
                    fail(memory, work, error)
            results = memory.engine.forward_backward([one for _, one in ready]) if ready else ()
            for (work, one), result in zip(ready, results, strict=True):
                if isinstance(result, UserError):
                    fail(memory, work, result)
                else:
                    targets = sum(datum.inputs[TARGETS].size for datum in one.data)
                    work.measured = WorkDone(
                        trained=work.request.num_tokens, loss=result.metrics["loss:sum"] / targets, loss_name=one.loss
                    )
                    body = forward_backward_output(result)
                    finish(memory, work, body, media=MEDIA_TYPE, repeated=not one.forward_only)

    def repeat(self, entry: Accepted, memory: ModelsInMemory) -> None:
        (result,) = memory.engine.forward_backward([_pass(self.read(entry.body), memory)])
        if isinstance(result, UserError):
            raise result


def _groups(works: Sequence[QueuedWork], memory: ModelsInMemory) -> Iterator[list[QueuedWork]]:
    """Works that are one call: as many as have room in memory, and not too many tokens."""
    group: list[QueuedWork] = []
    tokens = 0
    for work in works:
        more = work.request.num_tokens
        full = len(group) == memory.capabilities.models or tokens + more > memory.limits.together
        if group and full:
            yield group
            group, tokens = [], 0
        group.append(work)
        tokens += more
    if group:
        yield group


def _pass(request: ForwardBackward, memory: ModelsInMemory) -> Pass:
    return Pass(
        model=request.model_id,
        data=rows_of(request, memory.capabilities, memory.limits),
        loss=request.loss,
        settings=request.settings,
        forward_only=request.forward_only,
    )


class OptimStepKind(SingleKind):
    """A step of AdamW with the accumulated gradient, which nothing divides."""

    name = "optim_step"
    repeated = True

    def read(self, raw: bytes) -> OptimStep:
        return read_json(raw, OptimStep)

    def address(self, request: OptimStep) -> tuple[str, int]:
        return request.model_id, numbered(request.seq_id)

    def outcome(self, work: QueuedWork, memory: ModelsInMemory) -> tuple[dict[str, Any], list[Change]]:
        memory.need(work.entry.queue)
        found = memory.engine.optim_step(work.entry.queue, _adam(work.request))
        work.measured = WorkDone(steps=1)
        return finite(found), []

    def after(self, work: QueuedWork, memory: ModelsInMemory) -> None:
        memory.snapshot_if_due(work.entry.queue)

    def repeat(self, entry: Accepted, memory: ModelsInMemory) -> None:
        memory.engine.optim_step(entry.queue, _adam(self.read(entry.body)))


def _adam(request: OptimStep) -> Adam:
    if request.optimizer_params is not None:
        raise UserError("optimizer_params is not offered here; the optimizer is adamw, with adam_params")
    params = request.adam_params
    return Adam(
        rate=params.learning_rate,
        beta1=params.beta1,
        beta2=params.beta2,
        eps=params.eps,
        weight_decay=params.weight_decay,
        clip=max(0.0, params.grad_clip_norm),
    )
