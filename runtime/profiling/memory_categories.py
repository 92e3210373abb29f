"""What a rank holds in memory by what it is for: every storage once, however many tensors look at it."""

import gc
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from attrs import define, field
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from xtrain.runtime.models.parts import ModelParts

# In the order in which a storage that several of them share is counted.
CATEGORIES: Final = ("parameters", "gradients", "optimizer", "averages", "unsharded", "buffers", "other")
LARGEST: Final = 10


@define
class MemoryByCategory:
    """Bytes by category: on the device that computes, and in host memory where that is another one.

    optimizer: the moments; its counters of steps are `other`. unsharded: parameters that FSDP has gathered. other: all
    other tensors that Python knows of; those that only a graph of autograd keeps are not among them. largest: the
    largest of the others, as (bytes, type, shape).
    """

    device: dict[str, int] = field(factory=lambda: dict.fromkeys(CATEGORIES, 0))
    host: dict[str, int] = field(factory=lambda: dict.fromkeys(CATEGORIES, 0))
    largest: list[tuple[int, str, list[int]]] = field(factory=list)


def memory_by_category(
    model: ModelParts | None, optimizer: Optimizer | None, averages: Iterable[Tensor], device: torch.device
) -> MemoryByCategory:
    """Look at everything that is alive now. model, optimizer: None where they have not been made. averages: of the
    parameters."""
    found, seen = MemoryByCategory(), set[int]()
    # Those of the optimizer are the pieces of this rank, whatever FSDP has put into the model.
    if optimizer is not None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    else:
        parameters = [] if model is None else [*model.parameters()]
    named: dict[str, Iterable[Tensor | None]] = {
        "parameters": parameters,
        "gradients": [parameter.grad for parameter in parameters],
        "optimizer": () if optimizer is None else _moments(optimizer),
        "averages": averages,
        "unsharded": () if model is None else _gathered(model),
        "buffers": [] if model is None else [buffer for _, buffer in model.named_buffers()],
        "other": _alive(),
    }
    others: list[tuple[int, str, list[int]]] = []
    for category in CATEGORIES:
        for tensor in named[category]:
            piece = _piece(tensor)
            size = _new_bytes(piece, seen)
            if piece is None or not size:
                continue
            where = found.device if piece.device.type == device.type else found.host
            where[category] += size
            if category == "other":
                others.append((size, str(piece.dtype).removeprefix("torch."), list(piece.shape)))
    found.largest = sorted(others, reverse=True)[:LARGEST]
    return found


def _moments(optimizer: Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (tensor for tensor in state.values() if tensor.dim())


def _gathered(model: ModelParts) -> Iterator[Tensor]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            group: Any = module._get_fsdp_state()._fsdp_param_group
            for parameter in group.fsdp_params if group is not None else ():
                yield from parameter.all_gather_outputs


def _alive() -> Iterator[Tensor]:
    """All tensors of this process that Python knows of."""
    # By type: `isinstance` would ask objects that do what they like when they are asked.
    return (each for each in gc.get_objects() if issubclass(type(each), Tensor))


def _piece(tensor: Tensor | None) -> Tensor | None:
    """The part of this rank."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _new_bytes(piece: Tensor | None, seen: set[int]) -> int:
    """Bytes of the storage of a tensor that has not been seen before; 0 of one without."""
    if piece is None or piece.device.type == "meta":
        return 0
    try:
        storage = piece.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
    except (RuntimeError, NotImplementedError):
        return 0  # of a kind that has none: sparse ones, and those that stand for others
    if not address or address in seen:
        return 0
    seen.add(address)
    return size
