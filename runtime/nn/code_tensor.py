"""Tensor parallelism of layers of transformers: collectives around matrices that are cut.

Between matrices every rank has all positions, and all features unless they come from a matrix that is cut by output.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from xtrain.runtime.base.collectives import join, shared, split
from xtrain.runtime.nn.axes import Axes, local
from xtrain.runtime.nn.layers import Embedding, Linear
from xtrain.runtime.nn.moe import Experts

# The last whole input of cut matrices, and the tensor that they take: queries, keys and values have one input.
_ENTERED: ContextVar[list[Tensor]] = ContextVar("entered")


def _entering(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return `x`, whose gradient is summed over ranks."""
    last = _ENTERED.get()
    if not last or last[0] is not x:
        last[:] = x, shared(x, group)
    return last[1]


class _Column(Linear):
    """A matrix that is cut by output. joins: its outputs are gathered."""

    axes: Axes
    joins: bool

    def forward(self, input: Tensor) -> Tensor:
        tensor = self.axes.tensor
        if tensor is None:
            return super().forward(input)
        out = super().forward(_entering(input, tensor.group))
        return join(out, -1, tensor.group) if self.joins else out


class _Row(Linear):
    """A matrix that is cut by input. joins: its inputs are whole, and each rank takes its own."""

    axes: Axes
    joins: bool

    def forward(self, input: Tensor) -> Tensor:
        tensor = self.axes.tensor
        if tensor is None:
            return super().forward(input)
        x = split(input, -1, tensor.group) if self.joins else input
        summand = super().forward(x) if self.bias is None else self.without_bias(x)
        return self.row_parallel_sum(summand, tensor)


class _Tail(Linear):
    """A whole matrix whose outputs from `begin` on each rank uses for its own heads."""

    axes: Axes
    begin: int

    def forward(self, input: Tensor) -> Tensor:
        out, tensor = super().forward(input), self.axes.tensor
        if tensor is None:
            return out
        return torch.cat((out[..., : self.begin], shared(out[..., self.begin :], tensor.group)), -1)


@cache
def _with_base(base: type[nn.Module], own: type[nn.Module]) -> type[nn.Module]:
    return type(own.__name__, (base, own), {})


def cut_layer(layer: nn.Module, parameters: Sequence[Mapping[str, Any]], axes: Axes) -> None:
    """Let the matrices of a layer compute with pieces. parameters: of its kind in the description of the model."""
    for each in parameters:
        owner, _, name = each["name"].rpartition(".")
        module: Any = layer.get_submodule(owner)
        if each.get("partial"):
            module.partial = True
        base = {"column": _Column, "row": _Row}.get(each.get("cut", ""), _Tail if "begin" in each else None)
        if name != "weight" or base is None:
            continue
        module.__class__ = _with_base(base, type(module))
        module.axes, module.joins, module.begin = axes, each.get("joins", False), each.get("begin", 0)


def cut_embedding(embedding: Any, axes: Axes) -> None:
    """Let an embedding of transformers compute with a piece of the vocabulary."""
    own: type = type(embedding)
    embedding.__class__ = Embedding if own is nn.Embedding else _with_base(own, Embedding)
    embedding.axes = axes


@contextmanager
def local_parameters(modules: Iterable[nn.Module], axes: Axes) -> Iterator[None]:
    """Let modules of transformers see a rank's pieces of parameters as plain tensors within the block."""
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    token = _ENTERED.set([])
    try:
        for module in () if axes.tensor is None else modules:
            if not isinstance(module, Linear | Embedding | Experts) and module._parameters:
                parameters: dict[str, Any] = module._parameters
                before.append((parameters, dict(parameters)))
                partial = getattr(module, "partial", False)
                parameters |= {n: local(p, partial=partial) for n, p in parameters.items() if p is not None}
        yield
    finally:
        for parameters, values in before:
            parameters |= values
        _ENTERED.reset(token)
