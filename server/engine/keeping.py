"""Adapters that enter and leave slots and files: open, close, keep, load and export."""

import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from attrs import frozen
from msgspec.structs import asdict, replace
from torch import Tensor
from torch.distributed.tensor import DTensor

from xtrain.contracts.models import PlannedAdapter
from xtrain.dsl.schema.component import planned
from xtrain.dsl.schema.data_components import tokenizer_kind
from xtrain.plan.architecture import Architecture, ParameterSpec, buffers
from xtrain.plan.exported_config import ConfigValues, not_written
from xtrain.plan.graph import SETUP
from xtrain.plan.mesh import base_of_plan
from xtrain.plan.peft import PEFT_CONFIG, PEFT_WEIGHTS, lay_out_adapter, peft_config
from xtrain.plan.plan import Plan
from xtrain.plan.weight_files import CONFIG, WeightsUnreadable, header_of, read_file, read_weight_files
from xtrain.plan.weight_layout import assign, lay_out
from xtrain.runtime.base import files as durable
from xtrain.runtime.base.errors import ExportFailed
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Rank
from xtrain.runtime.feed.tokenizers import TextTokenizer
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.store.export import FORMATS, configs, origin_of
from xtrain.runtime.store.export_folder import new_folder
from xtrain.runtime.store.export_weights import WeightsWriter
from xtrain.runtime.store.stored_weights import TYPES, WeightReader
from xtrain.server.engine.messages import RankMessage
from xtrain.server.engine.passes import Handle
from xtrain.server.engine.slots import MOMENTS, AdapterSlot, Slots, put
from xtrain.server.engine_interface import AdapterSettings

KINDS: Final = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16"}
MOST: Final = 5 * 2**30  # bytes of a file


@frozen(eq=False)
class ModelFiles:
    """Writer of folders with the model of a plan."""

    plan: Plan
    tokenizer: TextTokenizer

    @classmethod
    def of(cls, plan: Plan, tokenizer: TextTokenizer) -> "ModelFiles | None":
        """Return a writer; None if transformers has no equivalent model, or if matrices are quantized."""
        arch = plan.architecture
        unfit = not_written(arch) is not None or base_of_plan(plan) is not None or any(buffers(arch))
        return None if unfit else cls(plan, tokenizer)

    def write(self, folder: Path, values: Mapping[str, Tensor]) -> None:
        """Write a folder. values: all parameters of the model, whole. Raises ExportFailed if the folder exists, and
        OSError."""
        plan, tokens, arch = self.plan, self.tokenizer, self.plan.architecture
        format, source = KINDS[next(iter(values.values())).dtype], plan.node("setup.tokenizer").args["source"]
        context = plan.node(SETUP).args["max_tokens"]
        about = ConfigValues(format=format, context=context, begin=tokens.bos, end=tokens.eos)
        here = Path()
        contents = tokenizer_kind(source).files(source, here)
        contents |= configs(arch, origin_of(plan, here), about, [tokens.eos])
        with new_folder(folder) as to:
            for name, content in contents.items():
                (to / name).parent.mkdir(exist_ok=True)
                durable.write(to / name, content)
            files = lay_out(arch, lambda parameter, number: FORMATS[format], MOST)
            writer = WeightsWriter(files, values.__getitem__, to, lambda *progress: None)
            writer.write()
            writer.verify()


def read_model(folder: Path, arch: Architecture, specs: tuple[ParameterSpec, ...]) -> dict[str, Tensor]:
    """Return some parameters of the model in a folder, whole. Raises OSError, ValueError or WeightsUnreadable."""
    files = read_weight_files(str(folder))
    kind = TYPES[next(iter(files.tensors.values())).format]
    values = {spec.name: torch.empty(spec.shape, dtype=kind) for spec in specs}
    with WeightReader(files, assign(arch, files), lambda done: None) as reader:
        reader.read(values.items())
    return values


STATE: Final = "trained.json"
TENSORS: Final = "trained.safetensors"
WHOLE: Final = AdapterSettings(rank=0, seed=0)  # of the model itself
NAMES: Final = {type: name for name, type in TYPES.items()}


@frozen(kw_only=True)
class KeptState:
    """Stored state of an adapter. shape: of the adapter. step: number of updates. tensors: whole, by parameter, and
    `NAME/MOMENT`."""

    shape: AdapterSettings
    step: int
    tensors: Mapping[str, Tensor]


def keep(folder: Path, state: KeptState) -> None:
    """Write and sync a new folder. Raises ExportFailed if it exists, and OSError."""
    with new_folder(folder) as to:
        durable.write(to / STATE, json.dumps({**asdict(state.shape), "step": state.step}, indent=2) + "\n")
        fd = durable.create(to / TENSORS)
        try:
            items = sorted(state.tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
            durable.append(fd, header_of((name, NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in items))
            for _, tensor in items:
                durable.append(fd, tensor.contiguous().view(torch.uint8).numpy().data.cast("B"))
        finally:
            os.close(fd)
        durable.sync(to / TENSORS)


def read_kept(folder: Path) -> KeptState:
    """Read a folder written by `keep`. Raises OSError, ValueError, KeyError, TypeError or WeightsUnreadable."""
    values = json.loads((folder / STATE).read_text())
    step = values.pop("step")
    shape = AdapterSettings(**{"unembed": False} | values)  # older files have no `unembed`
    return KeptState(shape=shape, step=step, tensors=_tensors(folder, TENSORS))


def export(folder: Path, slots: Slots, shape: AdapterSettings, values: Mapping[str, Tensor], base: str | None) -> None:
    """Write a PEFT folder; for the model itself its trained parameters under our names, if `ModelFiles` cannot write
    it.

    Raises ExportFailed if the folder exists, and OSError.
    """
    if slots.adapter is None:
        keep(folder, KeptState(shape=shape, step=0, tensors=values))
        return
    arch, trained = slots.shaped(shape.rank), slots.trained(shape)
    usual = FORMATS[KINDS[next(iter(values.values())).dtype]]
    file = lay_out_adapter(arch, trained, lambda parameter, name: usual)
    assert arch.adapter is not None
    config = peft_config(arch, trained, base, planned(arch.adapter, PlannedAdapter).for_peft)
    with new_folder(folder) as to:
        durable.write(to / PEFT_CONFIG, json.dumps(config, indent=2, sort_keys=True) + "\n")
        writer = WeightsWriter((file,), values.__getitem__, to, lambda *progress: None)
        writer.write()
        writer.verify()


def read_exported(folder: Path, slots: Slots) -> tuple[int, dict[str, Tensor]]:
    """Return the rank of an adapter written by `export` (0 for the model itself), and its parameters as in a slot.

    Raises OSError, ValueError, KeyError, TypeError or WeightsUnreadable.
    """
    if slots.adapter is None:
        if (folder / CONFIG).is_file():
            return 0, read_model(folder, slots.architecture, slots.trained(WHOLE))
        return 0, _fitting(dict(read_kept(folder).tensors), {spec.name: spec for spec in slots.trained(WHOLE)})
    config = json.loads((folder / PEFT_CONFIG).read_text())
    rank = int(config["r"])
    if not 1 <= rank <= slots.adapter.largest:
        raise ValueError(f"it has rank {rank}, and the server's adapter at most {slots.adapter.largest}")
    own = peft_config(
        slots.shaped(rank),
        slots.trained(replace(WHOLE, rank=rank)),
        None,
        planned(slots.adapter, PlannedAdapter).for_peft,
    )
    for name in ("lora_alpha", "use_rslora"):
        if config.get(name) != own.get(name):
            raise ValueError(f"it has {name} {config.get(name)}, and the server's adapter {own.get(name)}")
    stored = _tensors(folder, PEFT_WEIGHTS)
    whole = replace(WHOLE, rank=rank)
    specs: dict[str, ParameterSpec] = {spec.name: spec for spec in slots.trained(whole)}
    file = lay_out_adapter(slots.shaped(rank), tuple(specs.values()), lambda parameter, name: "F32")
    values: dict[str, Tensor] = {}
    for tensor in file.tensors:
        ((name, part),) = tensor.parts
        if tensor.name not in stored:
            continue  # its matrix has no adapter
        value = stored[tensor.name].transpose(-1, -2) if part.transposed else stored[tensor.name]
        if part.expert is None:
            values[name] = value
        else:
            values.setdefault(name, torch.zeros(specs[name].shape, dtype=value.dtype))[part.expert] = value
    return rank, _fitting(values, specs)


def _fitting(values: dict[str, Tensor], specs: Mapping[str, ParameterSpec]) -> dict[str, Tensor]:
    """Return tensors that parameters of the slot can take. Raises ValueError for others, of which clients send any."""
    for name, value in values.items():
        shape = specs[name].shape if name in specs else ()
        if tuple(value.shape) != shape:
            raise ValueError(f"it has {name} of shape {list(value.shape)}, and the model {list(shape)}")
    return values


def _tensors(folder: Path, name: str) -> dict[str, Tensor]:
    """Read all tensors of a file. Raises WeightsUnreadable or OSError."""
    stored = read_file(str(folder), name).tensors
    content = np.fromfile(folder / name, np.uint8)
    tensors: dict[str, Tensor] = {}
    for key, entry in stored.items():
        if entry.start + entry.bytes > len(content) or entry.format not in TYPES:
            raise WeightsUnreadable(f"{folder / name} is cut off, or has numbers of another kind", "save it again")
        data = torch.from_numpy(content[entry.start : entry.start + entry.bytes].copy())
        tensors[key] = data.view(TYPES[entry.format]).reshape(entry.shape)
    return tensors


UNREADABLE = (OSError, ValueError, KeyError, TypeError, WeightsUnreadable)


class RequestRefused(Exception):
    """Request that all ranks have refused; nothing was changed."""


def agree(rank: Rank, problem: str) -> None:
    """Raise RequestRefused on all ranks if any has a problem, with the first such rank's problem. Collective."""
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
    """Open a new adapter in a free slot. Raises RequestRefused if there is none."""

    def open_slot(message: RankMessage) -> RankMessage:
        slot = slots.free()
        if slot is None:
            raise RequestRefused(f"all {len(slots.slots)} adapter slots are in use; try again when one is free")
        slots.open(slot, AdapterSettings(**message.values["shape"]))
        slots.of_model[message.values["model"]] = slot
        return RankMessage(name=message.name)

    return open_slot


@op("request.close")
def close_adapter(slots: Slots) -> Handle:
    def close_slot(message: RankMessage) -> RankMessage:
        slots.of_model.pop(message.values["model"]).clear()
        return RankMessage(name=message.name)

    return close_slot


@op("request.keep")
def keep_adapter(rank: Rank, slots: Slots) -> Handle:
    """Write an adapter, its moments and steps into a new folder. Every rank takes part in gathering tensors."""

    def write_adapter(message: RankMessage) -> RankMessage:
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

    return write_adapter


@op("request.export")
def export_adapter(plan: Plan, rank: Rank, slots: Slots, model: ModelParts, tokenizer: TextTokenizer) -> Handle:
    """Write an adapter as a new PEFT folder, or the whole model as transformers reads it."""
    files = ModelFiles.of(plan, tokenizer) if slots.adapter is None else None
    args = plan.args("setup.read_weights")
    base = args.get("repo", args.get("folder"))

    def write_export(message: RankMessage) -> RankMessage:
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

    return write_export


@op("request.load")
def load_adapter(rank: Rank, slots: Slots) -> Handle:
    """Load a stored adapter into the slot of another of the same shape. Raises RequestRefused if it does not fit."""

    def load_state(message: RankMessage) -> RankMessage:
        slot, folder = slots.of_model[message.values["model"]], Path(message.values["folder"])
        assert slot.shape is not None
        state: KeptState | None = None
        try:
            state = read_kept(folder)
            problem = _mismatch(state, slots, slot.shape)
        except UNREADABLE as error:
            problem = f"the saved state cannot be read: {error}"
        agree(rank, problem)
        assert state is not None
        _take(slot, state, optimizer=message.values["optimizer"])
        return RankMessage(name=message.name)

    return load_state


def _mismatch(state: KeptState, slots: Slots, shape: AdapterSettings) -> str:
    """Say why a stored state does not fit an adapter of this shape; empty if it does. The seed does not matter."""
    for what in ("rank", "attn", "mlp", "unembed"):
        kept, own = getattr(state.shape, what), getattr(shape, what)
        if kept != own:
            return f"the saved state has {what} {kept}, but the model has {own}"
    for spec in slots.trained(shape):
        if spec.name not in state.tensors or tuple(state.tensors[spec.name].shape) != spec.shape:
            return f"the saved state lacks {spec.name}, or has it in another shape"
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


def whole_values(slots: Slots, slot: AdapterSlot, shape: AdapterSettings) -> dict[str, Tensor]:
    """Return the whole parameters of an adapter, as a run that trains it alone has them, on the first rank; possibly
    empty on others. Collective."""
    return {
        spec.name: _put_together(slots, slot, spec, slot.parameters.get(spec.name)) for spec in slots.trained(shape)
    }


def _put_together(slots: Slots, slot: AdapterSlot, spec: ParameterSpec, own: Tensor | None) -> Tensor:
    """Gather a whole tensor in the shape of the client's adapter. own: None on ranks of other pipeline stages; the
    owning stage sends to the first rank. Collective."""
    rank, whole_shape = slots.rank, slots.specs[spec.name].shape
    format = next(iter(slot.parameters.values())).dtype
    gathered = None if own is None else whole(own).to(format)
    source = slots.stages[spec.name] * (rank.world_size // rank.pipeline_ranks)
    if source and rank.rank == source:
        assert gathered is not None
        dist.send(gathered, dst=0)
    elif source and rank.is_first:
        gathered = torch.empty(whole_shape, dtype=format)
        dist.recv(gathered, src=source)
    return torch.empty(0) if gathered is None else gathered[tuple(slice(length) for length in spec.shape)].contiguous()


def whole(tensor: Tensor) -> Tensor:
    """Return a whole tensor, on the CPU. Collective."""
    detached = tensor.detach()
    return (detached.full_tensor() if isinstance(detached, DTensor) else detached).cpu()


def _first_writes(rank: Rank, write: Any) -> None:
    """Write on the first rank, and share its outcome. Raises RequestRefused."""
    problem = ""
    if rank.is_first:
        try:
            write()
        except (ExportFailed, OSError) as error:
            problem = f"it could not be written: {error}"
    agree(rank, problem)
