"""Modules of per-layer inputs (`blocks/layer_inputs.py`)."""

import torch
from torch import Tensor, nn

from xtrain.blocks.layer_inputs import LayerInputLayer, LayerInputsLayer, of_layer
from xtrain.plan.architecture import Architecture
from xtrain.runtime.nn.axes import Axes
from xtrain.runtime.nn.block import BlockInput, BlockSettings, Built, builds
from xtrain.runtime.nn.layers import ACTIVATIONS, Embedding, Linear, RMSNorm


class LayerInputs(nn.Module):
    """Inputs of all blocks. P: width of one of them, L: blocks."""

    def __init__(self, arch: Architecture, axes: Axes, layer: LayerInputsLayer) -> None:
        super().__init__()
        every = arch.blocks * layer.width
        self.width, self.scale = layer.width, arch.dim**-0.5
        self.table = Embedding(layer.vocab, every, axes)
        self.projection = Linear(arch.dim, every)
        self.norm = RMSNorm(layer.width, arch.norm_eps)

    def forward(self, x_BSD: Tensor, ids_BS: Tensor) -> tuple[Tensor, ...]:
        """Return the input [B, S, P] of each block."""
        own_BSLP = self.norm((self.projection(x_BSD) * self.scale).unflatten(-1, (-1, self.width)))
        token_BSLP = self.table(ids_BS).unflatten(-1, (-1, self.width))
        # Rounded as in transformers, which has the factor in fp32 first.
        factor = torch.tensor(self.width**0.5, dtype=torch.float32).to(x_BSD.dtype)
        return ((own_BSLP + token_BSLP * factor) * 2.0**-0.5).unbind(2)


class LayerInput(nn.Module):
    """Summand of the residual stream from the input of a block."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.gate = Linear(dim, width)
        self.projection = Linear(width, dim)

    def forward(self, x_BSD: Tensor, given_BSP: Tensor) -> Tensor:
        return self.projection(ACTIVATIONS["gelu_tanh"](self.gate(x_BSD)) * given_BSP)


@builds(LayerInputsLayer)
def _inputs(layer: LayerInputsLayer, settings: BlockSettings) -> Built:
    module = LayerInputs(settings.arch, settings.axes, layer)

    def call(x_BSD: Tensor, given: BlockInput) -> Tensor:
        assert given.ids_BS is not None
        for number, each in enumerate(module(x_BSD, given.ids_BS)):
            given.values[of_layer(number)] = (each,)
        return x_BSD

    return module, call


@builds(LayerInputLayer)
def _input(layer: LayerInputLayer, settings: BlockSettings) -> Built:
    module = LayerInput(settings.arch.dim, layer.width)
    name = layer.taken(settings.number)
    return module, lambda x_BSD, given: module(x_BSD, *given.values[name])
