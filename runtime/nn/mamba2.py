"""Mamba-2 mixer of a `Mamba2Layer`: convolution, state-space duality, gated norm."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor, nn

from xtrain.blocks.mamba2 import Mamba2Layer
from xtrain.plan.architecture import Architecture
from xtrain.runtime.nn.attention import AttentionKernel
from xtrain.runtime.nn.axes import Axes, column_parallel_input, local
from xtrain.runtime.nn.batch import DocumentLayout, LayerCache
from xtrain.runtime.nn.block import BlockSettings, Built, builds
from xtrain.runtime.nn.chunks import Scan
from xtrain.runtime.nn.layers import Linear, RMSNorm
from xtrain.runtime.nn.recurrent import Recurrence, RecurrentMixer, convolved, exact_of, of_each
from xtrain.runtime.nn.ssd import SsdInputs, ssd, ssd_gradients, ssd_step

# shapes: B rows, S positions, G groups, J heads of a group, H heads, K width of a write or read vector, V width of a
# head, R rows · groups


@frozen
class Ssd(Recurrence):
    """State-space duality of projections of values, of write and read vectors and of step sizes (before the softplus),
    of the weights of three convolutions and their biases, and of dt_bias, A_log and D. factors: of the projections."""

    moving = 4

    value_dim: int
    state_dim: int
    least_step: float
    most_step: float | None
    factors: tuple[float, ...] = (1.0,) * 4

    def spread(self, inputs: Sequence[Tensor]) -> int:
        return inputs[1].shape[-1] // self.state_dim

    def prepared(self, inputs: Sequence[Tensor], document_BS: Tensor) -> tuple[Tensor, ...]:
        *projected, dt_BSH = inputs[: self.moving]
        *convolutions, dt_bias_H, a_log_H, d_H = inputs[self.moving :]
        exact, groups = exact_of(inputs), self.spread(inputs)
        weights, biases = convolutions[: self.CONVOLVED], convolutions[self.CONVOLVED :] or (None,) * self.CONVOLVED
        # A factor of the inputs of a convolution is one of its weights.
        weights = [_times(each, factor) for each, factor in zip(weights, self.factors, strict=False)]
        parts = zip(projected, weights, biases, strict=True)
        x, k, q = (F.silu(convolved(part, weight, document_BS, exact, bias)) for part, weight, bias in parts)

        def of_groups(flat_BSA: Tensor) -> Tensor:
            return flat_BSA.unflatten(-1, (groups, -1)).transpose(1, 2).contiguous().flatten(0, 1)

        dt_BSH = F.softplus(_times(dt_BSH.to(exact), self.factors[-1]) + dt_bias_H.to(exact))
        if self.least_step or self.most_step is not None:
            dt_BSH = dt_BSH.clamp(self.least_step, self.most_step)
        decay_BSH = dt_BSH * -a_log_H.to(exact).exp()
        x_RTJV = of_groups(x).unflatten(-1, (-1, self.value_dim))
        d_RJ = d_H.to(exact).view(groups, -1).repeat(len(document_BS), 1)
        return SsdInputs(of_groups(q), of_groups(k), x_RTJV, of_groups(dt_BSH), of_groups(decay_BSH), d_RJ)

    def outputs(
        self, prepared: Sequence[Tensor], document_BS: Tensor, scan: Scan | None = None
    ) -> tuple[Tensor, Tensor]:
        out_RTJV, state_RKJV = ssd(SsdInputs(*prepared), of_each(document_BS, prepared), scan)
        return _of_rows(out_RTJV, len(document_BS)), state_RKJV

    def gradients(
        self, prepared: Sequence[Tensor], document_BS: Tensor, grad_BSHV: Tensor, scan: Scan | None = None
    ) -> tuple[Tensor, ...]:
        rows = len(prepared[0]) // len(document_BS)
        grad_RTJV = grad_BSHV.unflatten(2, (rows, -1)).transpose(1, 2).contiguous().flatten(0, 1)
        return ssd_gradients(SsdInputs(*prepared), of_each(document_BS, prepared), grad_RTJV, scan)

    @staticmethod
    def moved(maps: Tensor, states: Tensor, *, back: bool = False) -> Tensor:
        return states * maps[..., None, :, None]

    def step(self, prepared: Sequence[Tensor], state: Tensor, rows: int) -> Tensor:
        return _of_rows(ssd_step(SsdInputs(*prepared), state), rows)


class Mamba2(RecurrentMixer):
    """Mamba-2 mixer of a `Mamba2Layer`."""

    def __init__(self, arch: Architecture, kernel: AttentionKernel, axes: Axes, layer: Mamba2Layer) -> None:
        super().__init__(kernel, axes, layer)
        self.gate_scale, *factors = layer.factors
        self.how = Ssd(layer.head_dim, layer.state_dim, layer.least_step, layer.most_step, tuple(factors))
        inner, vectors, heads = layer.outputs(), layer.groups * layer.state_dim, layer.heads
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.A_log = nn.Parameter(torch.empty(heads))
        self.D = nn.Parameter(torch.empty(heads))
        self.project(arch, z=inner, x=inner, b=vectors, c=vectors, dt=heads, bias=layer.bias)
        self.convolve(x=inner, b=vectors, c=vectors, bias=layer.conv_bias)
        part = inner // layer.groups
        self.norm = None if layer.norm == "none" else RMSNorm(inner, arch.norm_eps, part=part)
        self.gates_first = layer.norm == "gated"
        self.out_proj = Linear(inner, arch.dim, bias=layer.has_output_bias)

    def forward(self, x_BSD: Tensor, packing: DocumentLayout, cache: LayerCache | None = None) -> Tensor:
        x_BSD = column_parallel_input(x_BSD, self.axes.tensor)
        z, *projected = (getattr(self, f"{name}_proj")(x_BSD) for name in ("z", "x", "b", "c", "dt"))
        convolutions = [getattr(self, f"{name}_conv") for name in "xbc"]
        biases = [each.bias for each in convolutions if each.bias is not None]
        weights = (*(each.weight for each in convolutions), *biases, self.dt_bias, self.A_log, self.D)
        out_BSA = self.mixed(self.how, (*projected, *map(local, weights)), packing, cache).flatten(-2)
        if self.norm is not None and not self.gates_first:
            out_BSA = self.norm(out_BSA)
        out_BSA = out_BSA * F.silu(_times(z, self.gate_scale))
        if self.norm is not None and self.gates_first:
            out_BSA = self.norm(out_BSA)
        return self.out_proj.row_parallel(out_BSA, self.axes.tensor)


@builds(Mamba2Layer)
def _mamba2(layer: Mamba2Layer, settings: BlockSettings) -> Built:
    module = Mamba2(settings.arch, settings.kernel, settings.axes, layer)
    return module, lambda x_BSD, given: module(x_BSD, given.packing, given.cache)


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor


def _of_rows(x_RTJV: Tensor, rows: int) -> Tensor:
    return x_RTJV.unflatten(0, (rows, -1)).transpose(1, 2).flatten(2, 3)
