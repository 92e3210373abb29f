"""Blocks on top of each other, without embedding and head."""

from typing import Any

import torch
from mixtures import fill
from torch import Tensor, nn

from xtrain.plan.architecture import Architecture
from xtrain.runtime.nn.attention import KERNELS
from xtrain.runtime.nn.axes import Axes
from xtrain.runtime.nn.batch import DocumentLayout
from xtrain.runtime.nn.block import DecoderBlock
from xtrain.runtime.nn.layers import Rotation
from xtrain.runtime.nn.transformer import ModelParts


class Tower(nn.Module):
    """`layers` under the names that the whole model gives them; every row is one document."""

    def __init__(self, arch: Architecture, axes: Axes, rows: int) -> None:
        super().__init__()
        self.arch = arch
        numbers = range(arch.layers)
        self.layers = nn.ModuleDict({str(i): DecoderBlock(arch, i, KERNELS["documents"], axes, rows) for i in numbers})

    def forward(self, x_BSD: Tensor, real_BS: Tensor) -> Tensor:
        rows, positions = real_BS.shape
        places_BS = torch.arange(positions).expand(rows, positions)
        rotate = Rotation.of(places_BS, self.arch.angles, x_BSD.dtype)
        bounds = torch.arange(0, rows * positions + 1, positions, dtype=torch.int32)
        packing = DocumentLayout.from_lengths(bounds, rows, positions, x_BSD.device)
        for block in self.layers.values():
            x_BSD = block(x_BSD, rotate, packing, real_BS)
        return x_BSD


def tower(
    arch: Architecture, axes: Axes | None = None, *, rows: int = 5, dtype: torch.dtype = torch.float64
) -> ModelParts:
    axes = axes or Axes()
    model: Any = Tower(arch, axes, rows).to(dtype)
    fill(model)
    return ModelParts((model,), axes)
