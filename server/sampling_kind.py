"""`asample`: continuations of a prompt, many requests at a time."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from xtrain.server.checks import check_tokens
from xtrain.server.engine import SampleQueue, SampleRequest, SampleResult, UserError
from xtrain.server.entries import SamplerEntry
from xtrain.server.json_wire import json_samples
from xtrain.server.kinds import JSON, Kind, fail, finish, required
from xtrain.server.messages import MEDIA_TYPE, sample_response
from xtrain.server.models_in_memory import ModelsInMemory
from xtrain.server.refusal import Refusal
from xtrain.server.requests import SampleBody, read_json
from xtrain.server.state import QueuedWork, WorkDone

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

    def read(self, raw: bytes) -> SampleBody:
        return read_json(raw, SampleBody)

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
        raise UserError("prompt has a chunk that is no text; only tokens of text are taken")
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
    stops = [params.stop] if isinstance(params.stop, str) else params.stop or []
    texts = tuple(stop for stop in stops if isinstance(stop, str))
    if "" in texts:
        raise UserError("sampling_params.stop has an empty text, which is in every sample")
    if texts and not capabilities.text:
        raise UserError("sampling_params.stop has texts, and this server has no tokenizer; use token ids")
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
            "the weights of this sampling session are no longer kept: without a name those of the newest "
            f"{memory.limits.samplers} sessions are"
        )
    return found
