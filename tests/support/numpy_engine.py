"""An engine in numpy, to test a server with: logits are h · W + h · A · B of the embedding h of the last token.

Shapes: T tokens, K targets, D width, R rank, V vocabulary.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xtrain.server.engine_interface import (
    IGNORED,
    Adam,
    AdapterSettings,
    Candidates,
    Capabilities,
    Datum,
    DrawnSample,
    EngineLost,
    LossInput,
    LossOffer,
    Pass,
    PassResult,
    SampleQueue,
    SampleRequest,
    SampleResult,
    UserError,
)

VOCABULARY, WIDTH, CONTEXT = 64, 40, 256
TARGETS = LossInput(name="target_tokens", integer=True)
POLICY = (TARGETS, LossInput(name="logprobs"), LossInput(name="advantages"), LossInput(name="weights", required=False))
OFFERS = {
    "cross_entropy": LossOffer(inputs=(TARGETS, LossInput(name="weights", required=False)), wide=True),
    "importance_sampling": LossOffer(inputs=POLICY),
    "ppo": LossOffer(inputs=POLICY, settings=frozenset({"clip_low_threshold", "clip_high_threshold"})),
}
_BASE = np.random.default_rng(20)
EMBEDDING_VD = _BASE.normal(size=(VOCABULARY, WIDTH)) / np.sqrt(WIDTH)
HEAD_DV = _BASE.normal(size=(WIDTH, VOCABULARY))


class Trained:
    """The adapter of a model, its gradient, moments and step."""

    def __init__(self, settings: AdapterSettings) -> None:
        first = np.random.default_rng(abs(settings.seed)).normal(size=(WIDTH, settings.rank))
        self.weights = {"A": first, "B": np.zeros((settings.rank, VOCABULARY))}
        self.forget()
        self.gradient = {name: np.zeros_like(weight) for name, weight in self.weights.items()}

    def forget(self) -> None:
        self.mean = {name: np.zeros_like(weight) for name, weight in self.weights.items()}
        self.square = {name: np.zeros_like(weight) for name, weight in self.weights.items()}
        self.steps = 0


class NumpyEngine:
    """calls: what was asked for, in order. lose: numbers of calls before which the engine is lost, counted on."""

    def __init__(self, models: int = 64, names: tuple[str, ...] = ("tiny/numpy",)) -> None:
        self.num_models, self.names = models, names
        self.models: dict[str, Trained] = {}
        self.calls: list[str] = []
        self.lose: set[int] = set()
        self.read: dict[Path, dict[str, np.ndarray]] = {}

    def _call(self, text: str) -> None:
        self.calls.append(text)
        if len(self.calls) in self.lose:
            raise EngineLost("as the test wants it")

    def start(self) -> Capabilities:
        self.models.clear()
        self.read.clear()
        return Capabilities(
            names=self.names, architecture="bigram", tokenizer=None, vocabulary=VOCABULARY, context=CONTEXT, rank=32,
            models=self.num_models, losses=OFFERS,
        )  # fmt: skip

    def close(self) -> None:
        self.models.clear()

    def create_model(self, model: str, adapter: AdapterSettings | None) -> None:
        self._call(f"create {model}")
        assert adapter is not None and model not in self.models and len(self.models) < self.num_models
        self.models[model] = Trained(adapter)

    def remove_model(self, model: str) -> None:
        self._call(f"remove {model}")
        del self.models[model]

    # training

    def forward_backward(self, passes: Sequence[Pass]) -> Sequence[PassResult | UserError]:
        assert len({one.model for one in passes}) == len(passes)
        for one in passes:
            self._call(f"{'forward' if one.forward_only else 'forward_backward'} {one.model}")
        return [self._pass(one) for one in passes]

    def _pass(self, one: Pass) -> PassResult | UserError:
        trained, total, outputs = self.models[one.model], 0.0, []
        if one.settings.get("clip_low_threshold") == -1.0:
            return UserError("clip_low_threshold is negative")
        for datum in one.data:
            logprobs_TV = logprobs(trained.weights, datum.tokens)
            targets_TK = datum.inputs["target_tokens"].reshape(len(datum.tokens), -1)
            kept_TK, targets_TK = targets_TK != IGNORED, np.maximum(targets_TK, 0)
            chosen_TK = np.take_along_axis(logprobs_TV, targets_TK, 1) * kept_TK
            loss, slope_TK = self._loss(one, datum, chosen_TK)
            total += loss
            outputs.append({"logprobs": chosen_TK.reshape(datum.inputs["target_tokens"].shape).astype(np.float32)})
            if one.forward_only:
                continue
            push_TV = -np.exp(logprobs_TV) * slope_TK.sum(1, keepdims=True)  # d loss / d logits
            np.add.at(push_TV, (np.arange(len(datum.tokens))[:, None], targets_TK), slope_TK)
            hidden_TD = EMBEDDING_VD[datum.tokens]
            trained.gradient["A"] += hidden_TD.T @ (push_TV @ trained.weights["B"].T)
            trained.gradient["B"] += (hidden_TD @ trained.weights["A"]).T @ push_TV
        return PassResult(outputs=outputs, metrics={"loss:sum": total, "rows:sum": float(len(one.data))})

    def _loss(self, one: Pass, datum: Datum, chosen_TK: np.ndarray) -> tuple[float, np.ndarray]:
        """The loss, and its derivative by each log-probability."""
        inputs = {name: value.reshape(chosen_TK.shape).astype(np.float64) for name, value in datum.inputs.items()}
        weights = inputs.get("weights", np.ones_like(chosen_TK))
        if one.loss == "cross_entropy":
            return -float((chosen_TK * weights).sum()), -weights
        ratio, gain = np.exp(chosen_TK - inputs["logprobs"]), inputs["advantages"]
        if one.loss == "importance_sampling":
            return -float((ratio * gain * weights).sum()), -ratio * gain * weights
        low, high = (one.settings.get(f"clip_{end}_threshold", at) for end, at in (("low", 0.8), ("high", 1.2)))
        clipped = np.clip(ratio, low, high)
        free = ratio * gain <= clipped * gain
        return -float((np.minimum(ratio * gain, clipped * gain) * weights).sum()), np.where(
            free, -ratio * gain * weights, 0
        )

    def optim_step(self, model: str, adam: Adam) -> Mapping[str, float]:
        self._call(f"optim_step {model}")
        trained = self.models[model]
        gradient = {name: one / adam.divisor for name, one in trained.gradient.items()}
        for one in trained.gradient.values():
            one[:] = 0
        norm = float(np.sqrt(sum((one**2).sum() for one in gradient.values())))
        scale = adam.clip / norm if 0 < adam.clip < norm else 1.0
        trained.steps += 1
        for name, weight in trained.weights.items():
            trained.mean[name] = adam.beta1 * trained.mean[name] + (1 - adam.beta1) * scale * gradient[name]
            trained.square[name] = adam.beta2 * trained.square[name] + (1 - adam.beta2) * (scale * gradient[name]) ** 2
            mean = trained.mean[name] / (1 - adam.beta1**trained.steps)
            square = trained.square[name] / (1 - adam.beta2**trained.steps)
            weight *= 1 - adam.rate * adam.weight_decay
            weight -= adam.rate * mean / (np.sqrt(square) + adam.eps)
        return {"grad_norm": norm, "step": float(trained.steps)}

    # folders

    def save(self, model: str, folder: Path) -> None:
        self._call(f"save {model}")
        trained = self.models[model]
        state: dict[str, Any] = {"steps": np.array(trained.steps)}
        for kind in ("weights", "mean", "square"):
            state |= {f"{kind}.{name}": value for name, value in getattr(trained, kind).items()}
        write(folder, state)

    def load(self, model: str, folder: Path, *, optimizer: bool) -> None:
        self._call(f"load {model}")
        trained = self.models[model]
        with np.load(folder / "state.npz", allow_pickle=False) as state:
            trained.weights = {name: state[f"weights.{name}"] for name in ("A", "B")}
            trained.forget()
            if optimizer:
                trained.steps = int(state["steps"])
                trained.mean = {name: state[f"mean.{name}"] for name in ("A", "B")}
                trained.square = {name: state[f"square.{name}"] for name in ("A", "B")}

    def export(self, model: str, folder: Path) -> None:
        self._call(f"export {model}")
        write(folder, self.models[model].weights)

    def forget(self, weights: Path) -> None:
        self.read.pop(weights, None)

    # sampling

    def sample(self, queue: SampleQueue) -> None:
        requests = list(queue.requests)
        while requests:
            for request in requests:
                self._call(f"sample {request.id}")
                queue.finished(request, self._sampled(request))
            requests = list(queue.arrived())

    def _sampled(self, request: SampleRequest) -> SampleResult:
        if request.weights is not None and request.weights not in self.read:
            with np.load(request.weights / "state.npz", allow_pickle=False) as state:
                self.read[request.weights] = dict(state)
        weights = self.read[request.weights] if request.weights is not None else None
        samples = [self._one(request, weights, number) for number in range(request.count)]
        scored_PV = logprobs(weights, request.prompt[:-1])
        given = np.take_along_axis(scored_PV, request.prompt[1:, None].astype(np.int64), 1)[:, 0]
        return SampleResult(
            samples=samples,
            prompt_logprobs=np.concatenate([[np.nan], given]) if request.prompt_logprobs else None,
            prompt_top=likeliest(scored_PV, request.prompt_top) if request.prompt_top else None,
        )

    def _one(self, request: SampleRequest, weights: Mapping[str, np.ndarray] | None, number: int) -> DrawnSample:
        random, last = np.random.default_rng([request.seed % 2**63, number]), int(request.prompt[-1])
        tokens, chances, rows, stopped = [], [], [], False
        while len(tokens) < request.most and not stopped:
            row_V = logprobs(weights, np.array([last]))[0]
            if request.temperature == 0:
                last = int(row_V.argmax())
            else:
                row_V = row_V / request.temperature
                row_V -= np.log(np.exp(row_V).sum())
                order = np.argsort(-row_V)[: request.top_k]
                share = np.exp(row_V[order])
                order = order[np.concatenate([[0.0], np.cumsum(share)[:-1]]) < request.top_p]
                last = int(random.choice(order, p=np.exp(row_V[order]) / np.exp(row_V[order]).sum()))
            tokens.append(last)
            chances.append(row_V[last])
            rows.append(row_V)
            stopped = last in request.stop_tokens
        top = likeliest(np.array(rows), request.sample_top) if request.sample_top else None
        return DrawnSample(tokens=np.array(tokens), logprobs=np.array(chances), stopped=stopped, top=top)


def logprobs(weights: Mapping[str, np.ndarray] | None, tokens: np.ndarray) -> np.ndarray:
    """[T, V]. weights: None is the base model."""
    hidden_TD = EMBEDDING_VD[tokens]
    logits_TV = hidden_TD @ HEAD_DV
    if weights is not None:
        logits_TV = logits_TV + hidden_TD @ weights["A"] @ weights["B"]
    logits_TV = logits_TV - logits_TV.max(-1, keepdims=True)
    return logits_TV - np.log(np.exp(logits_TV).sum(-1, keepdims=True))


def likeliest(logprobs_TV: np.ndarray, count: int) -> Candidates:
    order = np.argsort(-logprobs_TV, 1)[:, :count]
    return Candidates(tokens=order, logprobs=np.take_along_axis(logprobs_TV, order, 1))


def write(folder: Path, state: Mapping[str, np.ndarray]) -> None:
    """A new folder that lasts."""
    folder.mkdir()
    with (folder / "state.npz").open("wb") as file:
        np.savez(file, allow_pickle=False, **state)
        file.flush()
        os.fsync(file.fileno())
    for path in (folder, folder.parent):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
