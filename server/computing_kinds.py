"""Requests that compute: `forward_backward`, `optim_step` and `asample`, with their checks."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np
from attrs import evolve

from xtrain.server.access import ServerLimits
from xtrain.server.engine_interface import (
    IGNORED,
    TARGETS,
    Adam,
    Array,
    Capabilities,
    Datum,
    LossInput,
    LossOffer,
    Pass,
    SampleQueue,
    SampleRequest,
    SampleResult,
    UserError,
)
from xtrain.server.json_wire import (
    MOST_SINGLE,
    OPENS,
    OptimStep,
    Refusal,
    SampleBody,
    json_pass_result,
    json_samples,
    read_json_pass,
)
from xtrain.server.kinds import JSON, Kind, SingleKind, fail, finish, finite, required
from xtrain.server.messages import (
    MEDIA_TYPE,
    DatumRow,
    ForwardBackward,
    forward_backward_output,
    read_forward_backward,
    sample_response,
)
from xtrain.server.models_in_memory import ModelDamaged, ModelsInMemory
from xtrain.server.state import Accepted, Change, QueuedWork, SamplerEntry, WorkDone

EXACT = 2**24  # float32 represents all integers up to it


def rows_of(request: ForwardBackward, capabilities: Capabilities, limits: ServerLimits) -> list[Datum]:
    """Convert the rows of a request for an engine."""
    offer = capabilities.losses.get(request.loss)
    if offer is None:
        offered = ", ".join(sorted(capabilities.losses))
        raise UserError(f"loss_fn {request.loss[:80]!r} is not offered here; offered: {offered}")
    if unknown := sorted(set(request.settings) - offer.settings):
        known = ", ".join(sorted(offer.settings)) or "none"
        raise UserError(
            f"loss_fn_config has {unknown[0][:80]!r}, which {request.loss} does not read; it reads: {known}"
        )
    for name, value in request.settings.items():
        if not isinstance(value, float):
            raise UserError(f"loss_fn_config[{name!r}] is a text; {request.loss} reads a number there")
        if not abs(value) <= MOST_SINGLE:
            raise UserError(f"loss_fn_config[{name!r}] is not a finite number, or one that float32 does not have")
    if not request.rows:
        raise UserError("data is empty")
    if request.num_tokens > limits.tokens:
        raise UserError(f"data has {request.num_tokens} tokens; a request may have {limits.tokens}")
    name = "rows" if request.json else "data"
    found = [_datum(f"{name}[{number}]", row, request, offer, capabilities) for number, row in enumerate(request.rows)]
    if (targets := sum(datum.inputs[TARGETS].size for datum in found)) > limits.tokens:
        raise UserError(f"data has {targets} targets; a request may have {limits.tokens}")
    return [_without_ignored(datum) for datum in found] if request.json else found


def _without_ignored(datum: Datum) -> Datum:
    """Set all inputs to zero at ignored targets, as engines expect."""
    kept = datum.inputs[TARGETS] != IGNORED
    if kept.all():
        return datum
    inputs = {name: each if name == TARGETS else each * kept for name, each in datum.inputs.items()}
    return Datum(tokens=datum.tokens, inputs=inputs)


def _datum(place: str, row: DatumRow, request: ForwardBackward, offer: LossOffer, capabilities: Capabilities) -> Datum:
    loss = request.loss
    if row.tokens is None:
        raise UserError(f"{place}.model_input has a chunk that is not text; only tokens of text are supported")
    check_tokens(f"{place}.model_input", row.tokens, capabilities)
    known = {one.name: one for one in offer.inputs}
    for name in row.inputs:
        if name not in known:
            raise UserError(f"{place}.loss_fn_inputs has {name[:80]!r}, which {loss} does not read")
    inputs: dict[str, Array] = {}
    shape = row.inputs[TARGETS].shape if TARGETS in row.inputs else row.tokens.shape
    for one in offer.inputs:
        if one.name in row.inputs:
            inputs[one.name] = _input(place, one, row, shape, offer, capabilities, ignored=request.json)
        elif request.json and one.name == "weights":
            inputs[one.name] = np.ones(shape, np.float32)
        elif one.required:
            raise UserError(f"{place}.loss_fn_inputs has no {one.name!r}, which {loss} needs")
    if (targets := inputs[TARGETS].size) > capabilities.targets:
        raise UserError(f"{place} has {targets} targets; a row may have {capabilities.targets}")
    return Datum(tokens=row.tokens, inputs=inputs)


def _input(
    place: str,
    one: LossInput,
    row: DatumRow,
    shape: tuple[int, ...],
    offer: LossOffer,
    capabilities: Capabilities,
    *,
    ignored: bool,
) -> Array:
    """Return an input of a row after checking it. ignored: whether targets may be IGNORED."""
    where, numbers = f"{place}.loss_fn_inputs[{one.name!r}]", row.inputs[one.name]
    assert row.tokens is not None
    if numbers.ndim == 2 and not offer.wide:
        raise UserError(f"{where} has two dims; this loss takes one number per token")
    if numbers.shape[0] != row.tokens.size:
        raise UserError(f"{where} has {numbers.shape[0]} rows for {row.tokens.size} tokens")
    if not numbers.size:
        raise UserError(f"{where} lacks a number for a token")
    if numbers.shape != shape:
        raise UserError(f"{where} has shape {list(numbers.shape)}; target_tokens has {list(shape)}")
    if one.integer:
        if numbers.dtype.kind != "i":
            raise UserError(f"{where} must be int64")
        ids = numbers[numbers != IGNORED] if ignored else numbers
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < capabilities.vocabulary:
            besides = f", or {IGNORED} for a token without a loss" if ignored else ""
            raise UserError(f"{where} must be token ids of 0..{capabilities.vocabulary - 1}{besides}")
        return numbers
    if numbers.dtype.kind == "i":
        if not -EXACT <= int(numbers.min()) <= int(numbers.max()) <= EXACT:
            raise UserError(f"{where} has integers that float32 cannot represent")
        return numbers.astype(np.float32)
    if not np.isfinite(numbers).all():
        raise UserError(f"{where} has a number that is not finite")
    return numbers


def check_tokens(where: str, tokens: Array, capabilities: Capabilities) -> None:
    """Check the number and range of tokens. tokens: int32 [T]."""
    if not 1 <= tokens.size <= capabilities.context:
        raise UserError(f"{where} has {tokens.size} tokens; 1 to {capabilities.context} are supported")
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < capabilities.vocabulary:
        raise UserError(f"{where} must be token ids of 0..{capabilities.vocabulary - 1}")


ANY: Final = 2**62


class ForwardBackwardKind(Kind):
    """A pass over the rows of a model; `forward_only` leaves no gradient. Passes of several models are one
    engine call."""

    name = "forward_backward"
    media = (MEDIA_TYPE, JSON)
    together = 1024

    def read(self, raw: bytes) -> ForwardBackward:
        return read_json_pass(raw) if raw.startswith(OPENS) else read_forward_backward(raw)

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
    body = OptimStep

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


# Options of a request that are not supported, with their only accepted values.
NOT_OFFERED: Final = (
    "target_prompt_logprobs",
    "prompt_alt_tokens_k",
    "prompt_logprobs_last_n",
    "record_stability_info",
)


class SampleKind(Kind):
    """Draw samples of a sampling session, in any order; a repeated seq_id returns the same samples."""

    name = "asample"
    ordered = False
    together = 64
    body = SampleBody

    def address(self, request: SampleBody) -> tuple[str, int]:
        if request.base_model is not None or request.model_path is not None:
            raise Refusal(400, "base_model and model_path are for create_sampling_session; asample takes its id")
        return required(request.sampling_session_id, "sampling_session_id"), required(request.seq_id, "seq_id")

    def promised(self, work: QueuedWork, request: SampleBody) -> dict[str, Any]:
        return {"sample_sequence_ids": [f"{work.id}:{number}" for number in range(request.num_samples)]}

    def run(self, works: Sequence[QueuedWork], memory: ModelsInMemory) -> None:
        """Draw these samples, and those that arrive meanwhile as long as no model waits."""
        known: dict[str, QueuedWork] = {}

        def taken(more: Sequence[QueuedWork]) -> list[SampleRequest]:
            found = []
            for work in more:
                try:
                    found.append(_request(work, memory))
                    known[work.id] = work
                except UserError as error:
                    fail(memory, work, error)
            return found

        def finished(request: SampleRequest, result: SampleResult | UserError) -> None:
            work = known[request.id]
            if isinstance(result, UserError):
                fail(memory, work, result)
            elif work.request.format == "json":
                finish(memory, work, json_samples(result), media=JSON)
            else:
                work.measured = WorkDone(drawn=sum(len(sample.tokens) for sample in result.samples))
                finish(memory, work, sample_response(result), media=MEDIA_TYPE)

        if requests := taken(works):
            alone = any(work.attempts for work in works)  # a request during which an engine was lost runs alone
            memory.engine.sample(
                SampleQueue(
                    requests=requests,
                    arrived=lambda: () if alone else taken(memory.arrived()),
                    finished=finished,
                )
            )


def _request(work: QueuedWork, memory: ModelsInMemory) -> SampleRequest:
    request: SampleBody = work.request
    params, capabilities, sampler = request.sampling_params, memory.capabilities, _sampler(work, memory)
    for name in NOT_OFFERED:
        if getattr(request, name):
            raise UserError(f"{name} is not offered here")
    if any(chunk.type != "encoded_text" for chunk in request.prompt.chunks):
        raise UserError("prompt has a chunk that is not text; only tokens of text are supported")
    prompt = np.array([token for chunk in request.prompt.chunks for token in chunk.tokens], np.int32)
    check_tokens("prompt", prompt, capabilities)
    room = capabilities.context - prompt.size
    if params.max_tokens is not None and params.max_tokens > room:
        raise UserError(
            f"prompt has {prompt.size} tokens and max_tokens is {params.max_tokens}; the context is "
            f"{capabilities.context}"
        )
    if request.num_samples > memory.limits.samples:
        raise UserError(f"num_samples is {request.num_samples}; a request may have {memory.limits.samples}")
    if params.top_k == 0:
        raise UserError("sampling_params.top_k is 0; -1 draws from all")
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
        if getattr(request, name) > min(capabilities.top, capabilities.vocabulary):
            raise UserError(f"{name} is {getattr(request, name)}; there may be {capabilities.top}")
    if isinstance(params.seed, list) and len(params.seed) != request.num_samples:
        raise UserError(f"sampling_params.seed has {len(params.seed)} texts for {request.num_samples} samples")
    stops = [params.stop] if isinstance(params.stop, str) else params.stop or []
    texts = tuple(stop for stop in stops if isinstance(stop, str))
    if "" in texts:
        raise UserError("sampling_params.stop has an empty text, which would end every sample")
    if texts and not capabilities.text:
        raise UserError("sampling_params.stop has texts, but this server has no tokenizer; use token ids")
    return SampleRequest(
        id=work.id,
        weights=None if sampler.folder is None else memory.store.weights(sampler.folder),
        prompt=prompt,
        count=request.num_samples,
        most=params.max_tokens or room,
        temperature=params.temperature,
        top_k=None if params.top_k < 0 else params.top_k,
        top_p=params.top_p,
        seed=work.entry.seed if params.seed is None else params.seed,
        stop_tokens=frozenset(stop for stop in stops if isinstance(stop, int)),
        stop_texts=texts,
        stop_at_end=params.stop != [],  # an empty list: continue after the end of a text
        prompt_logprobs=bool(request.prompt_logprobs) or request.topk_prompt_logprobs > 0,
        prompt_top=request.topk_prompt_logprobs,
        sample_top=request.topk_sample_logprobs,
    )


def _sampler(work: QueuedWork, memory: ModelsInMemory) -> SamplerEntry:
    found = memory.store.state.samplers.get(work.entry.queue)
    if found is None:
        raise UserError(
            f"the weights of this sampling session are no longer kept: only the newest {memory.limits.samplers} "
            "sessions keep unnamed weights"
        )
    return found
