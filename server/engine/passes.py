"""Forward and backward passes of several adapters, and Adam updates of one."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor
from torch.distributed.tensor import DTensor

from xtrain.plan.graph import SETUP
from xtrain.plan.plan import Plan
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Rank
from xtrain.runtime.nn.axes import local
from xtrain.runtime.nn.batch import ModelBatch
from xtrain.runtime.nn.gradients import clip_factor, local_gradient, squares_of
from xtrain.runtime.nn.parallelize import reshard
from xtrain.runtime.nn.pipeline import PipelineSchedule, WrappedModel
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.observe.heartbeat import HeartbeatWriter
from xtrain.server.engine.messages import LOSSES, TARGETS, RankMessage, RowCut, TextRow, microbatch, put_losses, shares
from xtrain.server.engine.slots import MOMENTS, AdapterSlot, Slots

Handle = Callable[[RankMessage], RankMessage]


@frozen(kw_only=True, eq=False)
class WirePass:
    """Texts of one adapter for one loss."""

    model: str
    loss: str
    settings: Mapping[str, Any]
    forward_only: bool
    texts: Sequence[TextRow]

    def alike(self, text: TextRow) -> tuple[Any, ...]:
        """Return a key; texts with equal keys are computed together."""
        return self.loss, tuple(sorted(self.settings.items())), self.forward_only, text.wide


def pack(passes: Sequence[tuple[str, str, Mapping[str, Any], bool, Sequence[tuple[np.ndarray, Mapping[str, Any]]]]]):
    """Encode passes (model, loss, settings, forward only, [(tokens, inputs)]) as a message; arrays of all texts are
    concatenated."""
    heads: list[dict[str, Any]] = []
    tokens: list[np.ndarray] = []
    inputs: dict[str, list[np.ndarray]] = {}
    for model, loss, settings, forward_only, data in passes:
        heads.append(
            {
                "model": model,
                "loss": loss,
                "settings": dict(settings),
                "forward_only": forward_only,
                "lengths": [len(text) for text, _ in data],
                "wide": [1 if own[TARGETS].ndim == 1 else own[TARGETS].shape[1] for _, own in data],
            }
        )
        names = (TARGETS, *LOSSES[loss].columns)
        for text, own in data:
            tokens.append(np.asarray(text, np.int32))
            for name in names:
                kind = np.int64 if name == TARGETS else np.float32
                inputs.setdefault(f"{len(heads) - 1}.{name}", []).append(np.asarray(own[name], kind).reshape(-1))
    arrays = {name: np.concatenate(parts) for name, parts in inputs.items()}
    arrays["tokens"] = np.concatenate(tokens) if tokens else np.zeros(0, np.int32)
    return RankMessage(name="forward_backward", values={"passes": heads}, arrays=arrays)


def unpack(message: RankMessage, slots: Slots) -> list[WirePass]:
    """Return the passes of a message made by `pack`."""
    tokens, start, at = message.arrays["tokens"], 0, 0
    passes = []
    for number, head in enumerate(message.values["passes"]):
        texts, loss, own = [], LOSSES[head["loss"]], 0
        slot = slots.of_model[head["model"]].number
        for length, wide in zip(head["lengths"], head["wide"], strict=True):
            size = length * wide
            inputs = {
                name: message.arrays[f"{number}.{name}"][own : own + size].reshape(
                    (length, wide) if wide > 1 else length
                )
                for name in (TARGETS, *loss.columns)
            }
            texts.append(TextRow(tokens=tokens[at : at + length], inputs=inputs, slot=slot, start=start))
            start, at, own = start + size, at + length, own + size
        passes.append(
            WirePass(
                model=head["model"],
                loss=head["loss"],
                settings=head["settings"],
                forward_only=head["forward_only"],
                texts=texts,
            )
        )
    return passes


@op("request.forward_backward")
def forward_backward(
    plan: Plan,
    model: ModelParts,
    rank: Rank,
    slots: Slots,
    beat: HeartbeatWriter,
    wrapped: WrappedModel | None = None,
    pipeline: PipelineSchedule | None = None,
) -> Handle:
    """Compute the log-probability of every target and the loss of each pass; add gradients to the slots.

    Equal work of several adapters is computed together. Every rank has the same message.
    """
    wrapped = wrapped or WrappedModel.of(model)
    args = plan.node(SETUP).args
    rows, turn = args["rows"], args.get("microbatches", 1)
    routing, cut = model.axes.tasks, RowCut.of(rank, model.axes)
    counts = rank.is_tp_first and (pipeline is None or pipeline.has_last)

    def compute(like: WirePass, texts: Sequence[TextRow], logprobs: Tensor) -> None:
        """Fill in this rank's part of `logprobs`, which covers all targets of the message. like: a pass with these
        texts' loss."""
        loss = LOSSES[like.loss]
        model.minimise(loss.term(like.settings))
        if routing is not None:
            routing.part = frozenset(text.slot for text in texts)
        spare = texts[0].slot if routing is not None else None
        # With several targets a token, fewer texts at once: the head's inputs are repeated for each target.
        own = list(shares(texts, max(1, rows // texts[0].wide), rank.data_rank, rank.data_ranks))
        for first in range(0, len(own), turn):
            beat.mark()
            part = own[first : first + turn]
            batches = [microbatch(row_texts, loss.columns, rank.device, cut, spare) for row_texts in part]
            forward_and_backward(batches, like.forward_only, last=first + turn >= len(own))
            for batch, row_texts in zip(batches, part, strict=True) if counts else ():
                put_losses(batch, row_texts, logprobs)

    def forward_and_backward(batches: Sequence[ModelBatch], forward_only: bool, *, last: bool) -> None:
        if pipeline is not None and forward_only:
            for _ in pipeline.forward(batches):
                beat.mark()
        elif pipeline is not None:
            pipeline.add_gradients(batches, reduce=last)
        elif forward_only:
            with torch.no_grad():
                wrapped.forward(None, batches[0])
            reshard(model)  # otherwise the root's gathered parameters would become stale
        else:
            wrapped.sync_gradients(last)
            wrapped.forward(None, batches[0]).sum().backward()

    def compute_passes(message: RankMessage) -> RankMessage:
        passes = unpack(message, slots)
        last = passes[-1].texts[-1]
        logprobs = torch.zeros(last.start + last.targets, dtype=torch.float64)
        together: dict[tuple[Any, ...], tuple[WirePass, list[TextRow]]] = {}
        for wire in passes:
            for text in wire.texts:
                together.setdefault(wire.alike(text), (wire, []))[1].append(text)
        for like, texts in together.values():
            compute(like, texts, logprobs)
        if rank.world_size > 1:
            dist.all_reduce(logprobs)
        bounds = [*(wire.texts[0].start for wire in passes), len(logprobs)]
        losses = [_loss(wire, logprobs[begin:end]) for wire, (begin, end) in zip(passes, pairwise(bounds), strict=True)]
        return RankMessage(name=message.name, values={"losses": losses}, arrays={"logprobs": logprobs.numpy()})

    return compute_passes


def _loss(wire: WirePass, logprobs: Tensor) -> float:
    loss = LOSSES[wire.loss]
    columns = {
        name: torch.from_numpy(np.concatenate([text.inputs[name].reshape(-1) for text in wire.texts])).double()
        for name in loss.columns
    }
    return loss.sum(logprobs, columns, wire.settings)


@op("request.optim_step")
def optim_step(rank: Rank, slots: Slots, model: ModelParts) -> Handle:
    """Sum, measure, clip, apply and free gradients.

    values of the answer: `grad_norm`, before clipping, and `finite`: True if there was a step. A non-finite gradient is
    freed without a step.
    """

    @torch.no_grad()
    def update_adapter(message: RankMessage) -> RankMessage:
        slot, adam = slots.of_model[message.values["model"]], message.values["adam"]
        names = [name for name, parameter in slot.parameters.items() if parameter.grad is not None]
        own = [slot.parameters[name] for name in names]
        for parameter in own:
            _sum_partial(parameter)
        if own and adam["divisor"] != 1:
            torch._foreach_div_([local_gradient(parameter.grad) for parameter in own], adam["divisor"])  # pyright: ignore[reportPrivateImportUsage]
        norm = _norm(own, [1.0 / slots.copies[name] for name in names], rank)
        if math.isfinite(norm):
            limit = adam["clip"] or math.inf
            _update(slot, adam, clip_factor(norm, limit))
        slot.drop_gradients()
        return RankMessage(name=message.name, values={"grad_norm": norm, "finite": math.isfinite(norm)})

    return update_adapter


def _sum_partial(parameter: Tensor) -> None:
    """Sum the gradient over tensor-parallel ranks if each has a summand; fsdp has already added its own."""
    grad = parameter.grad
    if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
        parameter.grad = grad.redistribute(placements=parameter.placements)


def _norm(parameters: list[Any], weights: list[float], rank: Rank) -> float:
    """Return the norm over all ranks, every element counted once. Collective."""
    weights_P = torch.tensor(weights, dtype=torch.float64, device=rank.device)
    square = (squares_of([local_gradient(p.grad) for p in parameters], weights_P) * weights_P).sum()[None]
    if rank.world_size > 1:
        dist.all_reduce(square)
    total = square.item()
    return math.sqrt(total) if total >= 0 else math.nan


def _update(slot: AdapterSlot, adam: dict[str, Any], factor: float) -> None:
    """Update by AdamW (arXiv 1711.05101): m ← β₁ m + (1 − β₁) g; v ← β₂ v + (1 − β₂) g²; w ← (1 − lr · decay) w − lr ·
    m̂ / (√v̂ + eps), m̂ and v̂ corrected for their start at 0 by the adapter's own steps. A missing gradient counts
    as zero. Norms and embeddings do not decay."""
    slot.begin_moments()
    slot.step += 1
    for decays in (True, False):
        names = [name for name, spec in slot.specs.items() if spec.decays is decays]
        _update_all(slot, names, adam, factor, adam["weight_decay"] if decays else 0.0)


def _update_all(slot: AdapterSlot, names: list[str], adam: dict[str, Any], factor: float, decay: float) -> None:
    weights, gradients, moments = [], [], [[], []]
    for name in names:
        parameter = slot.parameters[name]
        weights.append(local(parameter))
        grad = parameter.grad
        own = torch.zeros_like(weights[-1]) if grad is None else local_gradient(grad)
        gradients.append(own if factor == 1 else own * factor)
        for place, moment in enumerate(MOMENTS):
            moments[place].append(local(slot.moments[name][moment]))
    if not weights:
        return
    device = weights[0].device
    torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
        weights,
        gradients,
        moments[0],
        moments[1],
        [],
        [torch.tensor(float(slot.step), device=device) for _ in weights],
        lr=adam["rate"],
        beta1=adam["beta1"],
        beta2=adam["beta2"],
        weight_decay=decay,
        eps=adam["eps"],
        amsgrad=False,
        maximize=False,
    )
