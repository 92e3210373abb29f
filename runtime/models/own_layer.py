"""The module of a `@layer` of the user's own: its parameters, and a call of the function with this rank's pieces."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import _StopRecomputationError  # pyright: ignore[reportPrivateUsage]

from xtrain.planner.blocks.user_layer import UserLayer
from xtrain.runtime.data.user_parts import UserPart, failures_of
from xtrain.runtime.models.tiled import TiledModule
from xtrain.runtime.parallel.axes import Axes
from xtrain.runtime.parallel.tensor import column_parallel_input, local, row_parallel_output


class WeightHolder(nn.Module):
    """A parameter under a name of its own, so that tensor parallelism can cut it by itself."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))


class OwnLayer(TiledModule):
    """What a function makes of activations [B, S, D]."""

    def __init__(self, layer: UserLayer, part: UserPart, axes: Axes) -> None:
        super().__init__()
        self.is_cut, self.axes, self.part, self.function = layer.is_cut, axes, part, part.load()
        self.tiles = layer.tiles
        self.is_whole = {weight.owner: weight.cut is None for weight in layer.weights}
        for weight in layer.weights:
            self.add_module(weight.owner, WeightHolder(weight.shape))

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Raises PartFailed for what the function raises, and for a result of another shape or number format."""
        if not self.is_cut:
            return self.in_pieces(x_BSD)
        tensor = self.axes.tensor
        return row_parallel_output(self.in_pieces(column_parallel_input(x_BSD, tensor)), tensor)

    def of_piece(self, x_BSD: Tensor) -> Tensor:
        tensor = self.axes.tensor
        # A rank has only a summand of the gradient of what is not cut: of its own matrices, or of its own positions.
        partial = tensor is not None and (self.is_cut or tensor.sequence)
        weights = {
            name: local(getattr(self, name).weight, partial=partial and whole) for name, whole in self.is_whole.items()
        }
        return self._call(x_BSD, weights)

    def _call(self, x_BSD: Tensor, weights: dict[str, Any]) -> Tensor:
        if torch.compiler.is_compiling():
            return self.function(x_BSD, **weights, **self.part.arguments)
        out_BSD: Any = None
        stopped: _StopRecomputationError | None = None
        with failures_of(self.part):
            try:
                out_BSD = self.function(x_BSD, **weights, **self.part.arguments)
            except _StopRecomputationError as stop:  # a backward has all that it computes again
                stopped = stop
        if stopped is not None:
            try:
                raise stopped
            finally:
                del stopped  # its traceback holds this frame and what the function has computed: no circle of them
        if not isinstance(out_BSD, Tensor) or out_BSD.shape != x_BSD.shape or out_BSD.dtype != x_BSD.dtype:
            found = type(out_BSD).__name__
            if isinstance(out_BSD, Tensor):
                found = f"{out_BSD.dtype} of shape {tuple(out_BSD.shape)}"
            raise self.part.failed(f"gave {found} for {x_BSD.dtype} of shape {tuple(x_BSD.shape)}, and gives as many")
        return out_BSD
