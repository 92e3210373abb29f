"""The torch side of `theirs`."""

import torch.nn.functional as F
from theirs import GeluLayer
from torch import Tensor, nn

from xtrain.runtime.nn.axes import column_parallel_input, row_parallel_output
from xtrain.runtime.nn.block import BlockSettings, Built, builds
from xtrain.runtime.nn.layers import Linear


class Gelu(nn.Module):
    def __init__(self, of: BlockSettings) -> None:
        super().__init__()
        self.axes = of.axes
        self.up_proj = Linear(of.arch.dim, of.arch.ffn)
        self.down_proj = Linear(of.arch.ffn, of.arch.dim)

    def forward(self, x_BSD: Tensor) -> Tensor:
        up_BSF = self.up_proj(column_parallel_input(x_BSD, self.axes.tensor))
        return row_parallel_output(self.down_proj(F.gelu(up_BSF)), self.axes.tensor)


@builds(GeluLayer)
def build(layer: GeluLayer, of: BlockSettings) -> Built:
    module = Gelu(of)
    return module, lambda x_BSD, _: module(x_BSD)
