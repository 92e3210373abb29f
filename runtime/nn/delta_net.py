"""Gated delta-net mixer of a `DeltaNetLayer`: convolution, delta rule, gated norm."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor, nn

from xtrain.blocks.delta_net import DeltaNetLayer
from xtrain.plan.architecture import Architecture
from xtrain.runtime.nn.attention import AttentionKernel
from xtrain.runtime.nn.axes import Axes, column_parallel_input, local
from xtrain.runtime.nn.batch import DocumentLayout, LayerCache
from xtrain.runtime.nn.block import BlockSettings, Built, builds
from xtrain.runtime.nn.chunks import Scan
from xtrain.runtime.nn.delta_rule import Inputs, delta_rule, delta_rule_gradients, delta_step
from xtrain.runtime.nn.layers import Linear, RMSNorm
from xtrain.runtime.nn.recurrent import Recurrence, RecurrentMixer, convolved, exact_of, of_each

NORM_EPS = 1e-6  # of queries and keys

# shapes: B rows, S positions, H value heads, K width of a key, V width of a value, R rows · value heads


@frozen
class DeltaRule(Recurrence):
    """Delta rule of projections of queries, keys and values, of b and a (before the sigmoid and the softplus), of the
    weights of three convolutions, and of dt_bias and A_log."""

    moving = 5

    key_dim: int
    value_dim: int

    def spread(self, inputs: Sequence[Tensor]) -> int:
        return inputs[0].shape[-1] // self.key_dim

    def prepared(self, inputs: Sequence[Tensor], document_BS: Tensor) -> tuple[Tensor, ...]:
        """Return `Inputs`: heads of queries and keys have unit length, and queries are divided by the root of their
        width."""
        *projected, b_BSH, a_BSH = inputs[: self.moving]
        *weights, dt_bias_H, a_log_H = inputs[self.moving :]
        exact, key_dim = exact_of(inputs), self.key_dim
        parts = zip(projected, weights, strict=True)
        q, k, v = (F.silu(convolved(part, weight, document_BS, exact)) for part, weight in parts)
        groups = v.shape[-1] * key_dim // (q.shape[-1] * self.value_dim)

        def heads(flat_BSC: Tensor, width: int, times: int) -> Tensor:
            x_BHSA = flat_BSC.unflatten(-1, (-1, width)).transpose(1, 2)
            return (x_BHSA.repeat_interleave(times, dim=1) if times > 1 else x_BHSA).flatten(0, 1)

        def unit(x: Tensor) -> Tensor:
            return x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()

        decay = -a_log_H.to(exact).exp() * F.softplus(a_BSH.to(exact) + dt_bias_H.to(exact))
        beta = b_BSH.to(exact).sigmoid()
        return Inputs(
            unit(heads(q, key_dim, groups)) * key_dim**-0.5,
            unit(heads(k, key_dim, groups)),
            heads(v, self.value_dim, 1),
            decay.transpose(1, 2).flatten(0, 1),
            beta.transpose(1, 2).flatten(0, 1),
        )

    def outputs(
        self, prepared: Sequence[Tensor], document_BS: Tensor, scan: Scan | None = None
    ) -> tuple[Tensor, Tensor]:
        out_RTV, state_RKV = delta_rule(Inputs(*prepared), of_each(document_BS, prepared), scan)
        return _of_rows(out_RTV, len(document_BS)), state_RKV

    def gradients(
        self, prepared: Sequence[Tensor], document_BS: Tensor, grad_BSHV: Tensor, scan: Scan | None = None
    ) -> tuple[Tensor, ...]:
        grad_RTV = grad_BSHV.transpose(1, 2).flatten(0, 1)
        return delta_rule_gradients(Inputs(*prepared), of_each(document_BS, prepared), grad_RTV, scan)

    @staticmethod
    def moved(maps: Tensor, states: Tensor, *, back: bool = False) -> Tensor:
        return (maps.mT if back else maps) @ states

    def step(self, prepared: Sequence[Tensor], state: Tensor, rows: int) -> Tensor:
        return _of_rows(delta_step(Inputs(*(each[:, -1:] for each in prepared)), state), rows)


class DeltaNet(RecurrentMixer):
    """Gated delta net of a `DeltaNetLayer`."""

    def __init__(self, arch: Architecture, kernel: AttentionKernel, axes: Axes, layer: DeltaNetLayer) -> None:
        super().__init__(kernel, axes, layer)
        self.how = DeltaRule(layer.key_dim, layer.value_dim)
        keys, values, heads = layer.key_heads * layer.key_dim, layer.value_heads * layer.value_dim, layer.value_heads
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.A_log = nn.Parameter(torch.empty(heads))
        self.project(arch, q=keys, k=keys, v=values, z=values, b=heads, a=heads)
        self.convolve(q=keys, k=keys, v=values)
        self.norm = RMSNorm(layer.value_dim, arch.norm_eps, by_head=True)
        self.out_proj = Linear(values, arch.dim)

    def forward(self, x_BSD: Tensor, packing: DocumentLayout, cache: LayerCache | None = None) -> Tensor:
        x_BSD = column_parallel_input(x_BSD, self.axes.tensor)
        q, k, v, z, b, a = (getattr(self, f"{name}_proj")(x_BSD) for name in "qkvzba")
        weights = (*(getattr(self, f"{name}_conv").weight for name in "qkv"), self.dt_bias, self.A_log)
        out_BSHV = self.mixed(self.how, (q, k, v, b, a, *map(local, weights)), packing, cache)
        out_BSHV = self.norm(out_BSHV) * F.silu(z.unflatten(-1, (-1, self.how.value_dim)))
        return self.out_proj.row_parallel(out_BSHV.flatten(-2), self.axes.tensor)


@builds(DeltaNetLayer)
def _delta_net(layer: DeltaNetLayer, settings: BlockSettings) -> Built:
    module = DeltaNet(settings.arch, settings.kernel, settings.axes, layer)
    return module, lambda x_BSD, given: module(x_BSD, given.packing, given.cache)


def _of_rows(x_RTV: Tensor, rows: int) -> Tensor:
    return x_RTV.unflatten(0, (rows, -1)).transpose(1, 2)
