"""Pipeline stages of models that transformers' own code computes: the trunk runs, with the layers of a stage alone.

Shapes: B rows, S positions, D width of the residual stream.
"""

from functools import cache
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, nn

from xtrain.runtime.nn.model_code import CodeModel


class _StageEnd(Exception):
    """The trunk has reached the first layer after a stage. stream: [B, S, D]."""

    def __init__(self, stream: Tensor) -> None:
        super().__init__()
        self.stream = stream


class _Outside(nn.Module):
    """A layer that another stage has: a base of the classes that `_outside_class` makes."""

    stream: Tensor | None  # input of the stage
    is_behind: bool
    items: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x_BSD = args[0] if args else kwargs["hidden_states"]
        if self.is_behind:
            raise _StageEnd(x_BSD)
        x_BSD = x_BSD if self.stream is None else self.stream
        return (x_BSD, *[None] * (self.items - 1)) if self.items else x_BSD


@cache
def _outside_class(own: type[nn.Module]) -> type[nn.Module]:
    return type(own.__name__, (_Outside, own), {})


@define(eq=False)
class CodeStage:
    """Layers first to last of a model, both included, run by the trunk of all of it.

    Layers before a stage pass the stage's input on, and the first layer after it ends the forward. items: number of
    values that a layer returns as a tuple; 0: it returns a tensor. before: places of modules that run before the layers
    and have parameters: a later stage has no values of them, and drops what they compute.
    """

    code: CodeModel
    first: int
    last: int
    items: int
    before: frozenset[str] = field(factory=frozenset)
    _filled: tuple[torch.device, torch.dtype] | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        for number, layer in enumerate(self.code.layers):
            if not self.first <= number <= self.last:
                layer.__class__ = _outside_class(type(layer))
                layer.stream, layer.is_behind, layer.items = None, number > self.last, self.items  # type: ignore

    @property
    def embeds(self) -> bool:
        return self.first == 0

    def _fill_others(self, given: Tensor) -> None:
        """Give modules that only an earlier stage has zeros, which take no memory."""
        if self._filled == (given.device, given.dtype):
            return
        self._filled = given.device, given.dtype
        places = self.code.places
        for outside in (module for module in self.code.outside if places[module] in self.before):
            for module in outside.modules():
                for tensors in (module._parameters, module._buffers):
                    for name, tensor in tensors.items():
                        if tensor is not None:
                            dtype = given.dtype if tensor.is_floating_point() else tensor.dtype
                            zero = torch.zeros((), dtype=dtype, device=given.device)
                            tensors[name] = zero.expand(tensor.shape)  # type: ignore[assignment]

    def __call__(self, given: Tensor, positions_BS: Tensor | None) -> Tensor:
        """Return the residual stream after the stage, or of the last stage the head's input [B, S, D]. given: token ids
        [B, S] of the first stage, the residual stream of others."""
        try:
            if self.embeds:
                return self.code.hidden(given, positions_BS)
            self._fill_others(given)
            before: Any = self.code.layers[self.first - 1]
            before.stream = given
            try:
                return self.code.run(positions_BS, inputs_embeds=given.detach())
            finally:
                before.stream = None
        except _StageEnd as end:
            return end.stream
