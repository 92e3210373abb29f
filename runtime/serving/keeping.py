"""`request.open`, `close`, `keep`, `load` and `export`: adapters come into slots, go out of them and into files."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from xtrain.planner.architecture import ParameterSpec
from xtrain.planner.plan import Plan
from xtrain.planner.weights.files import WeightsUnreadable
from xtrain.runtime.data.documents.tokenizers import TextTokenizer
from xtrain.runtime.errors import ExportFailed
from xtrain.runtime.models.parts import ModelParts
from xtrain.runtime.ops import op
from xtrain.runtime.serving.files import KeptState, export, keep, read_kept
from xtrain.runtime.serving.messages import RankMessage
from xtrain.runtime.serving.model_files import ModelFiles
from xtrain.runtime.serving.passes import Handle
from xtrain.runtime.serving.slots import MOMENTS, AdapterShape, AdapterSlot, Slots, put
from xtrain.runtime.state import Rank

UNREADABLE = (OSError, ValueError, KeyError, TypeError, WeightsUnreadable)


class RequestRefused(Exception):
    """A request that cannot be done, as all ranks know; nothing was changed."""


def agree(rank: Rank, problem: str) -> None:
    """Raises RequestRefused on all ranks if any of them has a problem, with what the first of these has. Collective."""
    if rank.world_size == 1:
        if problem:
            raise RequestRefused(problem)
        return
    first = torch.tensor(rank.rank if problem else rank.world_size)
    dist.all_reduce(first, op=dist.ReduceOp.MIN)
    if int(first) < rank.world_size:
        raise RequestRefused(problem or f"rank {int(first)} could not do it")


@op("request.open")
def open_adapter(slots: Slots) -> Handle:
    """A new adapter in a slot that is free. Raises RequestRefused where there is none."""

    def run(message: RankMessage) -> RankMessage:
        slot = slots.free()
        if slot is None:
            raise RequestRefused(f"all {len(slots.slots)} places for adapters are taken; try again when one is free")
        slots.open(slot, AdapterShape(**message.values["shape"]))
        slots.of_model[message.values["model"]] = slot
        return RankMessage(name=message.name)

    return run


@op("request.close")
def close_adapter(slots: Slots) -> Handle:
    def run(message: RankMessage) -> RankMessage:
        slots.of_model.pop(message.values["model"]).clear()
        return RankMessage(name=message.name)

    return run


@op("request.keep")
def keep_adapter(rank: Rank, slots: Slots) -> Handle:
    """Write an adapter, its moments and steps into a new folder. Every rank takes part in putting tensors together."""

    def run(message: RankMessage) -> RankMessage:
        slot = slots.of_model[message.values["model"]]
        assert slot.shape is not None
        tensors = whole_values(slots, slot, slot.shape)
        for spec in slots.trained(slot.shape) if slot.step else ():
            for moment in MOMENTS:
                own = slot.moments.get(spec.name, {}).get(moment)
                tensors[f"{spec.name}/{moment}"] = _put_together(slots, slot, spec, own)
        state = KeptState(shape=slot.shape, step=slot.step, tensors=tensors)
        _first_writes(rank, lambda: keep(Path(message.values["folder"]), state))
        return RankMessage(name=message.name)

    return run


@op("request.export")
def export_adapter(plan: Plan, rank: Rank, slots: Slots, model: ModelParts, tokenizer: TextTokenizer) -> Handle:
    """Write an adapter as PEFT reads it into a new folder, or the model itself as transformers does, with what is not
    trained of it."""
    files = ModelFiles.of(plan, tokenizer) if slots.adapter is None else None
    args = next((node.args for node in plan.nodes if node.op == "setup.read_weights"), {})
    base = args.get("repo", args.get("folder"))

    def run(message: RankMessage) -> RankMessage:
        slot = slots.of_model[message.values["model"]]
        assert slot.shape is not None
        shape, folder = slot.shape, Path(message.values["folder"])
        if files is not None:
            own = dict(model.named_parameters())
            every = {name: _put_together(slots, slot, spec, own.get(name)) for name, spec in slots.specs.items()}
            _first_writes(rank, partial(files.write, folder, every))
        else:
            values = whole_values(slots, slot, shape)
            _first_writes(rank, lambda: export(folder, slots, shape, values, base))
        return RankMessage(name=message.name)

    return run


@op("request.load")
def load_adapter(rank: Rank, slots: Slots) -> Handle:
    """Put what was kept of an adapter into the slot of another of the same shape. Raises RequestRefused where it does
    not fit."""

    def run(message: RankMessage) -> RankMessage:
        slot, folder = slots.of_model[message.values["model"]], Path(message.values["folder"])
        assert slot.shape is not None
        state: KeptState | None = None
        try:
            state = read_kept(folder)
            problem = _mismatch(state, slots, slot.shape)
        except UNREADABLE as error:
            problem = f"what was saved cannot be read: {error}"
        agree(rank, problem)
        assert state is not None
        _take(slot, state, optimizer=message.values["optimizer"])
        return RankMessage(name=message.name)

    return run


def _mismatch(state: KeptState, slots: Slots, shape: AdapterShape) -> str:
    """Why what was kept is not of an adapter of this shape; empty where it is. The seed is of no account."""
    for what in ("rank", "attn", "mlp", "unembed"):
        kept, own = getattr(state.shape, what), getattr(shape, what)
        if kept != own:
            return f"what was saved has {what} {kept}, and the model has {own}"
    for spec in slots.trained(shape):
        if spec.name not in state.tensors or tuple(state.tensors[spec.name].shape) != spec.shape:
            return f"what was saved lacks {spec.name}, or has it in another shape"
    return ""


def _take(slot: AdapterSlot, state: KeptState, *, optimizer: bool) -> None:
    slot.drop_gradients()
    slot.forget_moments()
    slot.put(state.tensors)
    if optimizer and state.step:
        slot.step = state.step
        slot.begin_moments()
        for name, moments in slot.moments.items():
            for moment in MOMENTS:
                put(moments[moment], state.tensors.get(f"{name}/{moment}"))


def whole_values(slots: Slots, slot: AdapterSlot, shape: AdapterShape) -> dict[str, Tensor]:
    """The parameters of an adapter, put together, as a run that trains it alone has them, on the first rank; empty
    ones may be on others. Collective."""
    return {
        spec.name: _put_together(slots, slot, spec, slot.parameters.get(spec.name)) for spec in slots.trained(shape)
    }


def _put_together(slots: Slots, slot: AdapterSlot, spec: ParameterSpec, own: Tensor | None) -> Tensor:
    """A parameter, or what is beside it, as large as that of the client's adapter. own: None on ranks of other stages
    of a pipeline, which send theirs to the first rank. Collective."""
    rank, whole_shape = slots.rank, slots.specs[spec.name].shape
    format = next(iter(slot.parameters.values())).dtype
    found = None if own is None else whole(own).to(format)
    source = slots.stages[spec.name] * (rank.world_size // rank.pipeline_ranks)
    if source and rank.rank == source:
        assert found is not None
        dist.send(found, dst=0)
    elif source and rank.is_first:
        found = torch.empty(whole_shape, dtype=format)
        dist.recv(found, src=source)
    return torch.empty(0) if found is None else found[tuple(slice(length) for length in spec.shape)].contiguous()


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on the CPU. Collective."""
    found = tensor.detach()
    return (found.full_tensor() if isinstance(found, DTensor) else found).cpu()


def _first_writes(rank: Rank, write: Any) -> None:
    """The first rank writes; all know whether it could. Raises RequestRefused."""
    problem = ""
    if rank.is_first:
        try:
            write()
        except (ExportFailed, OSError) as error:
            problem = f"it could not be written: {error}"
    agree(rank, problem)
