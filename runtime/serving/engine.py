"""`Engine` of the server over the ranks of a plan, wherever these are: requests as messages, answers as results."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import asdict, define, field

from xtrain.planner.plan import Plan
from xtrain.planner.serving.graph import SETUP, WHOLE
from xtrain.runtime.serving.losses import LOSSES
from xtrain.runtime.serving.messages import RankMessage
from xtrain.runtime.serving.passes import pack
from xtrain.runtime.serving.ranks import REFUSED
from xtrain.runtime.serving.slots import attending
from xtrain.server.engine import (
    Adam,
    AdapterSettings,
    Candidates,
    Capabilities,
    DrawnSample,
    Pass,
    PassResult,
    SampleQueue,
    SampleRequest,
    SampleResult,
    UserError,
)

Call = Callable[[RankMessage], RankMessage]


@define(eq=False)
class RanksEngine:
    """call: lets all ranks carry out a request, and gives the answer of the first one; raises EngineLost.

    models: of each its settings, as they are in the slots.
    """

    plan: Plan
    call: Call
    models: dict[str, AdapterSettings | None] = field(factory=dict)

    def start(self) -> Capabilities:
        """The ranks begin without any model; those that they have are removed."""
        for model in list(self.models):
            self.remove_model(model)
        return self.capabilities

    @property
    def capabilities(self) -> Capabilities:
        plan, args = self.plan, self.plan.node(SETUP).args
        source = plan.node("setup.tokenizer").args["source"]
        return Capabilities(
            names=(args["model_name"],),
            architecture=plan.architecture.family,
            tokenizer=source,
            vocabulary=plan.architecture.vocab,
            context=args["max_tokens"],
            rank=args["max_rank"],
            models=args["adapters"],
            losses={name: loss.offer for name, loss in LOSSES.items()},
            matrices=_matrices(plan),
            targets=args["rows"] * args["max_tokens"],
            text=True,
        )

    def create_model(self, model: str, adapter: AdapterSettings | None) -> None:
        if adapter is None and self.capabilities.rank != WHOLE:
            raise UserError("this server trains adapters, not the model itself: give a rank")
        chosen = AdapterSettings(rank=WHOLE, seed=0) if adapter is None else adapter
        self._ask("open", model=model, shape=asdict(chosen))
        self.models[model] = adapter

    def remove_model(self, model: str) -> None:
        self._ask("close", model=model)
        del self.models[model]

    def forward_backward(self, passes: Sequence[Pass]) -> Sequence[PassResult | UserError]:
        found = self._call(
            pack(
                [(p.model, p.loss, p.settings, p.forward_only, [(d.tokens, d.inputs) for d in p.data]) for p in passes]
            )
        )
        logprobs, at, results = found.arrays["logprobs"], 0, []
        for each, loss in zip(passes, found.values["losses"], strict=True):
            outputs = []
            for datum in each.data:
                shape = datum.inputs["target_tokens"].shape
                size = int(np.prod(shape))
                outputs.append({"logprobs": logprobs[at : at + size].astype(np.float32).reshape(shape)})
                at += size
            results.append(PassResult(outputs=outputs, metrics={"loss:sum": loss}))
        return results

    def optim_step(self, model: str, adam: Adam) -> Mapping[str, float]:
        found = self._ask("optim_step", model=model, adam=asdict(adam))
        if not found.values["finite"]:
            raise UserError("the gradient is not finite: it is dropped, and the model is as it was")
        return {"grad_norm": found.values["grad_norm"]}

    def save(self, model: str, folder: Path) -> None:
        self._ask("keep", model=model, folder=str(folder.absolute()))

    def load(self, model: str, folder: Path, *, optimizer: bool) -> None:
        self._ask("load", model=model, folder=str(folder.absolute()), optimizer=optimizer)

    def export(self, model: str, folder: Path) -> None:
        self._ask("export", model=model, folder=str(folder.absolute()))

    def forget(self, weights: Path) -> None:
        self._ask("forget", folder=str(weights.absolute()))

    def sample(self, queue: SampleQueue) -> None:
        """All that has come is written together, a few tokens at a time; what comes meanwhile joins."""
        open: dict[str, SampleRequest] = {}
        new, first = list(queue.requests), True
        while new or open:
            open |= {each.id: each for each in new}
            prompts = {f"prompt.{each.id}": np.asarray(each.prompt, np.int32) for each in new}
            values = {"first": first, "requests": [_values(each) for each in new]}
            found = self._call(RankMessage(name="sample", values=values, arrays=prompts))
            for id in found.values["done"]:
                request = open.pop(id)
                queue.finished(request, _result(found, request))
            for id, reason in found.values["refused"].items():
                queue.finished(open.pop(id), UserError(reason))
            new, first = list(queue.arrived()), False

    def close(self) -> None:
        """The ranks are ended by whoever has started them."""

    def _ask(self, name: str, **values: Any) -> RankMessage:
        return self._call(RankMessage(name=name, values=values))

    def _call(self, message: RankMessage) -> RankMessage:
        answer = self.call(message)
        if answer.name == REFUSED:
            raise UserError(answer.values["reason"])
        return answer


def _matrices(plan: Plan) -> frozenset[str]:
    """The kinds of matrices that have an adapter in a slot."""
    adapted = {each.adapter for each in plan.parameters.tensors if each.task}
    head = {plan.architecture.head_parameter.name} & adapted
    attend = adapted.intersection(attending(plan.architecture.base)) if adapted else set[str]()
    kinds = {"attn": attend, "mlp": adapted - attend - head, "unembed": head}
    return frozenset(kind for kind, names in kinds.items() if names)


def _values(request: SampleRequest) -> dict[str, Any]:
    return {
        "id": request.id,
        "weights": None if request.weights is None else str(request.weights.absolute()),
        "count": request.count,
        "most": request.most,
        "temperature": request.temperature,
        "top_k": request.top_k,
        "top_p": request.top_p,
        "seed": request.seed,
        "stop_tokens": sorted(request.stop_tokens),
        "stop_texts": list(request.stop_texts),
        "stop_at_end": request.stop_at_end,
        "prompt_logprobs": request.prompt_logprobs,
        "prompt_top": request.prompt_top,
        "sample_top": request.sample_top,
    }


def _result(found: RankMessage, request: SampleRequest) -> SampleResult:
    arrays, id = found.arrays, request.id
    samples = [
        DrawnSample(
            tokens=arrays[f"tokens.{id}.{each}"],
            logprobs=arrays[f"logprobs.{id}.{each}"],
            stopped=found.values["stopped"][id][each],
            top=_candidates(arrays, f"{id}.{each}", "top"),
        )
        for each in range(request.count)
    ]
    return SampleResult(
        samples=samples,
        prompt_logprobs=arrays.get(f"prompt_logprobs.{id}"),
        prompt_top=_candidates(arrays, id, "prompt_top"),
    )


def _candidates(arrays: Mapping[str, np.ndarray], name: str, kind: str) -> Candidates | None:
    if f"{kind}_tokens.{name}" not in arrays:
        return None
    return Candidates(tokens=arrays[f"{kind}_tokens.{name}"], logprobs=arrays[f"{kind}_logprobs.{name}"])
