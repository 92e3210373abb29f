"""`forward_backward` and `optim_step`: what changes a model."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from attrs import evolve

from xtrain.server.checks import rows_of
from xtrain.server.engine import Adam, Pass, UserError
from xtrain.server.entries import Accepted, Change
from xtrain.server.json_wire import OPENS, json_pass_result, read_json_pass
from xtrain.server.kinds import JSON, Kind, SingleKind, fail, finish, finite, numbered
from xtrain.server.messages import MEDIA_TYPE, ForwardBackward, forward_backward_output, read_forward_backward
from xtrain.server.models_in_memory import ModelDamaged, ModelsInMemory
from xtrain.server.requests import OptimStep, read_json
from xtrain.server.state import QueuedWork, WorkDone

ANY: Final = 2**62


class ForwardBackwardKind(Kind):
    """A pass over the rows of a model; `forward_only` leaves no gradient. Passes of several models are one
    engine call."""

    name = "forward_backward"
    media = (MEDIA_TYPE, JSON)
    together = 1024

    def read(self, raw: bytes) -> ForwardBackward:
        return read_json_pass(raw) if raw.startswith(OPENS) else read_forward_backward(raw)

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
                    continue
                memory.count(one)
                if work.request.json:
                    body, media = json_pass_result(result, one.num_targets), JSON
                else:
                    body, media = forward_backward_output(result), MEDIA_TYPE
                work.measured = WorkDone(
                    trained=work.request.num_tokens,
                    loss=result.metrics["loss:sum"] / max(1, one.num_targets),
                    loss_name=one.loss,
                )
                finish(memory, work, body, media=media, repeated=not one.forward_only)

    def repeat(self, entry: Accepted, memory: ModelsInMemory) -> None:
        one = _pass(self.read(entry.body), memory, again=True)
        (result,) = memory.engine.forward_backward([one])
        if isinstance(result, UserError):
            raise result
        memory.count(one)


def _groups(works: Sequence[QueuedWork], memory: ModelsInMemory) -> Iterator[list[QueuedWork]]:
    """Yield groups of requests for one engine call: limited by models in memory and by tokens."""
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


def _pass(request: ForwardBackward, memory: ModelsInMemory, *, again: bool = False) -> Pass:
    """Return the pass of a request. again: it was executed before, perhaps by a server with a longer context."""
    capabilities, limits = memory.capabilities, memory.limits
    if again:
        capabilities = evolve(capabilities, context=ANY, targets=ANY)
        limits = evolve(limits, tokens=ANY)
    return Pass(
        model=request.model_id,
        data=rows_of(request, capabilities, limits),
        loss=request.loss,
        settings=request.settings,
        forward_only=request.forward_only,
    )


class OptimStepKind(SingleKind):
    """A step of AdamW with the accumulated gradient. With `reduction` mean it is divided once by the number of targets
    of all passes since the last step; otherwise it is not divided."""

    name = "optim_step"
    repeated = True

    def read(self, raw: bytes) -> OptimStep:
        return read_json(raw, OptimStep)

    def address(self, request: OptimStep) -> tuple[str, int]:
        return request.model_id, numbered(request.seq_id)

    def outcome(self, work: QueuedWork, memory: ModelsInMemory) -> tuple[dict[str, Any], list[Change]]:
        memory.need(work.entry.queue)
        found = self._step(work.entry.queue, work.request, memory)
        work.measured = WorkDone(steps=1)
        return finite(found), []

    def after(self, work: QueuedWork, memory: ModelsInMemory) -> None:
        memory.snapshot_if_due(work.entry.queue)

    def repeat(self, entry: Accepted, memory: ModelsInMemory) -> None:
        with suppress(UserError):  # as before: a gradient that was not finite is dropped again
            self._step(entry.queue, self.read(entry.body), memory)

    def _step(self, model: str, request: OptimStep, memory: ModelsInMemory) -> Mapping[str, float]:
        adam = _adam(request, memory.targets.get(model, 0))
        memory.targets.pop(model, None)
        return memory.engine.optim_step(model, adam)


def _adam(request: OptimStep, targets: int) -> Adam:
    """Return the Adam settings. targets: number of targets with a loss in the gradient."""
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
        divisor=max(1.0, targets) if request.reduction == "mean" else 1.0,
    )
