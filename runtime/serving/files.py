"""What is trained in files: what a server keeps of one to go on with it, and the folder that PEFT reads.

Both are folders that are there as a whole or not at all, with tensors as safetensors.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
import torch
from attrs import asdict, evolve, frozen
from torch import Tensor

from xtrain.planner.architecture import ParameterSpec
from xtrain.planner.model.peft import PEFT_CONFIG, PEFT_WEIGHTS, lay_out_adapter, peft_config
from xtrain.planner.weights.files import CONFIG, WeightsUnreadable, header_of, read_file
from xtrain.runtime.checkpoint.stored_weights import TYPES
from xtrain.runtime.export.export import FORMATS
from xtrain.runtime.export.new_folder import new_folder
from xtrain.runtime.export.weights import WeightsWriter
from xtrain.runtime.files import durable
from xtrain.runtime.serving.model_files import KINDS, read_model
from xtrain.runtime.serving.slots import AdapterShape, Slots

STATE: Final = "trained.json"
TENSORS: Final = "trained.safetensors"
WHOLE: Final = AdapterShape(rank=0, seed=0, attn=True, mlp=True, unembed=True)  # of the model itself
NAMES: Final = {type: name for name, type in TYPES.items()}


@frozen(kw_only=True)
class KeptState:
    """shape: of the adapter. step: how often it was updated. tensors: whole, by parameter, and `NAME/MOMENT`."""

    shape: AdapterShape
    step: int
    tensors: Mapping[str, Tensor]


def keep(folder: Path, state: KeptState) -> None:
    """Write a new folder; all of it is on the disk then. Raises ExportFailed if there is one, and OSError."""
    with new_folder(folder) as to:
        durable.write(to / STATE, json.dumps({**asdict(state.shape), "step": state.step}, indent=2) + "\n")
        fd = durable.create(to / TENSORS)
        try:
            items = sorted(state.tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
            durable.append(fd, header_of((name, NAMES[each.dtype], tuple(each.shape)) for name, each in items))
            for _, each in items:
                durable.append(fd, each.contiguous().view(torch.uint8).numpy().data.cast("B"))
        finally:
            os.close(fd)
        durable.sync(to / TENSORS)


def read_kept(folder: Path) -> KeptState:
    """What `keep` has written. Raises OSError, ValueError, KeyError, TypeError or WeightsUnreadable."""
    values = json.loads((folder / STATE).read_text())
    step = values.pop("step")
    return KeptState(shape=AdapterShape(**values), step=step, tensors=_tensors(folder, TENSORS))


def export(folder: Path, slots: Slots, shape: AdapterShape, values: Mapping[str, Tensor], base: str | None) -> None:
    """Write the folder that PEFT reads; of the model itself what is trained of it, by our names, where no folder of
    `ModelFiles` can have it.

    Raises ExportFailed if there is one, and OSError.
    """
    if slots.adapter is None:
        keep(folder, KeptState(shape=shape, step=0, tensors=values))
        return
    arch, trained = slots.shaped(shape.rank), slots.trained(shape)
    usual = FORMATS[_format(values)]
    file = lay_out_adapter(arch, trained, lambda parameter, name: usual)
    config = peft_config(arch, trained, base)
    with new_folder(folder) as to:
        durable.write(to / PEFT_CONFIG, json.dumps(config, indent=2, sort_keys=True) + "\n")
        writer = WeightsWriter((file,), values.__getitem__, to, lambda *progress: None)
        writer.write()
        writer.verify()


def read_exported(folder: Path, slots: Slots) -> tuple[int, dict[str, Tensor]]:
    """The rank of an adapter that `export` has written, 0 for the model itself, and its parameters as a slot has them.

    Raises OSError, ValueError, KeyError, TypeError or WeightsUnreadable.
    """
    if slots.adapter is None:
        if (folder / CONFIG).is_file():
            return 0, read_model(folder, slots.architecture, slots.trained(WHOLE))
        return 0, dict(read_kept(folder).tensors)
    rank = int(json.loads((folder / PEFT_CONFIG).read_text())["r"])
    stored = _tensors(folder, PEFT_WEIGHTS)
    whole = evolve(WHOLE, rank=rank)
    specs: dict[str, ParameterSpec] = {each.name: each for each in slots.trained(whole)}
    file = lay_out_adapter(slots.shaped(rank), tuple(specs.values()), lambda parameter, name: "F32")
    found: dict[str, Tensor] = {}
    for tensor in file.tensors:
        ((name, part),) = tensor.parts
        if tensor.name not in stored:
            continue  # its matrix has no adapter
        value = stored[tensor.name].transpose(-1, -2) if part.transposed else stored[tensor.name]
        if part.expert is None:
            found[name] = value
        else:
            found.setdefault(name, torch.zeros(specs[name].shape, dtype=value.dtype))[part.expert] = value
    return rank, found


def _format(values: Mapping[str, Tensor]) -> str:
    return KINDS[next(iter(values.values())).dtype]


def _tensors(folder: Path, name: str) -> dict[str, Tensor]:
    """All tensors of a file. Raises WeightsUnreadable or OSError."""
    found = read_file(str(folder), name).tensors
    content = np.fromfile(folder / name, np.uint8)
    tensors: dict[str, Tensor] = {}
    for key, each in found.items():
        if each.start + each.bytes > len(content) or each.format not in TYPES:
            raise WeightsUnreadable(f"{folder / name} is cut off, or has numbers of another kind", "save it again")
        data = torch.from_numpy(content[each.start : each.start + each.bytes].copy())
        tensors[key] = data.view(TYPES[each.format]).reshape(each.shape)
    return tensors
