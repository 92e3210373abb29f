"""Gated delta-net mixer of a `DeltaNetLayer`: convolution, delta rule, gated norm; with a state instead of a cache."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from xtrain.blocks.delta_net import DeltaNetLayer
from xtrain.plan.architecture import Architecture
from xtrain.runtime.base.collectives import to_heads, to_positions
from xtrain.runtime.nn.attention import AttentionKernel, AttentionModule
from xtrain.runtime.nn.attention_blocks import PLAIN, exact_type
from xtrain.runtime.nn.axes import Axes, column_parallel_input, local
from xtrain.runtime.nn.batch import DocumentLayout, KeyValueCache, LayerCache
from xtrain.runtime.nn.block import BlockSettings, Built, builds
from xtrain.runtime.nn.delta_rule import Inputs, delta_rule, delta_rule_gradients, delta_step
from xtrain.runtime.nn.layers import Linear, RMSNorm, WeightHolder
from xtrain.runtime.nn.recompute import as_one

NORM_EPS = 1e-6  # of queries and keys

# shapes: B rows, S positions, H value heads, J key heads, K width of a key, V width of a value, W positions of the
# convolution, C channels, R rows · value heads


class Mixed(NamedTuple):
    """Projections of all positions, and the parameters that mix them.

    q_BSC, k_BSC, v_BSC: before the convolution, key heads or value heads side by side. b_BSH, a_BSH: before the
    sigmoid and the softplus.
    """

    q_BSC: Tensor
    k_BSC: Tensor
    v_BSC: Tensor
    b_BSH: Tensor
    a_BSH: Tensor
    q_conv_C1W: Tensor
    k_conv_C1W: Tensor
    v_conv_C1W: Tensor
    dt_bias_H: Tensor
    a_log_H: Tensor

    @property
    def convolved(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Projections that are convolved, each with its weights."""
        return (
            (self.q_BSC, self.q_conv_C1W),
            (self.k_BSC, self.k_conv_C1W),
            (self.v_BSC, self.v_conv_C1W),
        )


class DeltaNet(AttentionModule):
    """Gated delta net of a `DeltaNetLayer`. Context parallelism gathers whole rows for some of the heads."""

    compiles = False  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __init__(self, arch: Architecture, kernel: AttentionKernel, axes: Axes, layer: DeltaNetLayer) -> None:
        super().__init__(kernel, axes, PLAIN)
        self.key_dim, self.value_dim, self.width = layer.key_dim, layer.value_dim, layer.kernel
        keys, values, heads = layer.key_heads * layer.key_dim, layer.value_heads * layer.value_dim, layer.value_heads
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.A_log = nn.Parameter(torch.empty(heads))
        self.q_proj, self.k_proj = Linear(arch.dim, keys), Linear(arch.dim, keys)
        self.v_proj, self.z_proj = Linear(arch.dim, values), Linear(arch.dim, values)
        self.b_proj, self.a_proj = Linear(arch.dim, heads), Linear(arch.dim, heads)
        self.q_conv, self.k_conv, self.v_conv = (
            WeightHolder((width, 1, layer.kernel)) for width in (keys, keys, values)
        )
        self.norm = RMSNorm(layer.value_dim, arch.norm_eps, by_head=True)
        self.out_proj = Linear(values, arch.dim)

    def forward(self, x_BSD: Tensor, packing: DocumentLayout, cache: LayerCache | None = None) -> Tensor:
        x_BSD = column_parallel_input(x_BSD, self.axes.tensor)
        projections = self.q_proj, self.k_proj, self.v_proj, self.z_proj, self.b_proj, self.a_proj
        q, k, v, z, b, a = (project(x_BSD) for project in projections)
        weights = (self.q_conv.weight, self.k_conv.weight, self.v_conv.weight, self.dt_bias, self.A_log)
        mixed = Mixed(q, k, v, b, a, *map(local, weights))
        if cache is None:
            out_BSHV = self._spread(mixed, packing)
        elif cache.filled == 0:
            out_BSHV = self._begun(mixed, packing, cache)
        else:
            out_BSHV = self._continued(mixed, cache)
        out_BSHV = self.norm(out_BSHV) * F.silu(z.unflatten(-1, (-1, self.value_dim)))
        return self.out_proj.row_parallel(out_BSHV.flatten(-2), self.axes.tensor)

    def _spread(self, mixed: Mixed, packing: DocumentLayout) -> Tensor:
        """Compute this rank's positions [B, S, H, V]."""
        groups = [group for group in (self.axes.ulysses, self.axes.ring) if group is not None]
        if not groups:
            return _mix(packing.document_BS, self.key_dim, self.value_dim, *mixed)
        heads = mixed.q_BSC.shape[-1] // self.key_dim
        parts = [part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in mixed[:5]]
        joined_BJSA = torch.cat(parts, dim=-1)
        own = [weight.unflatten(0, (heads, -1)) for weight in mixed[5:]]
        for group in groups:
            (joined_BJSA,) = to_heads((joined_BJSA,), group)
            own = [weight.chunk(group.size())[group.rank()] for weight in own]
        document_BS, order_BS = packing.document_BS, None
        if self.axes.ring is not None:
            order_BS = torch.tensor(_order(packing.segments, self.axes.ring.size()), device=document_BS.device)
        if order_BS is not None:
            joined_BJSA = _taken(joined_BJSA, order_BS.argsort(1))
        inputs = joined_BJSA.split([part.shape[-1] for part in parts], dim=-1)
        flat = (part.transpose(1, 2).flatten(2) for part in inputs)
        out_BSHV = _mix(document_BS, self.key_dim, self.value_dim, *flat, *(each.flatten(0, 1) for each in own))
        out_BJSA = out_BSHV.unflatten(2, (joined_BJSA.shape[1], -1)).flatten(-2).transpose(1, 2)  # pyright: ignore
        if order_BS is not None:
            out_BJSA = _taken(out_BJSA, order_BS)
        for group in reversed(groups):
            out_BJSA = to_positions(out_BJSA, group)
        return out_BJSA.transpose(1, 2).flatten(2).unflatten(-1, (-1, self.value_dim))

    def _begun(self, mixed: Mixed, packing: DocumentLayout, cache: LayerCache) -> Tensor:
        """Compute prompts, and keep the state and the inputs of the convolution after the last position."""
        document_BS, rows = packing.document_BS, len(mixed.q_BSC)
        out, state_RKV = delta_rule(
            _prepared(mixed, document_BS, self.key_dim, self.value_dim), _by_head(document_BS, mixed)
        )
        last = [_tail(part, document_BS, self.width - 1) for part in mixed[:3]]
        assert isinstance(cache, KeyValueCache)  # a server with such layers is refused (X449)
        cache.keep(self, (state_RKV, *last))
        return _of_rows(out, rows).to(mixed.q_BSC.dtype)

    def _continued(self, mixed: Mixed, cache: LayerCache) -> Tensor:
        """Compute one position, and move the state on."""
        assert isinstance(cache, KeyValueCache)
        state_RKV, *last = cache.kept(self)
        whole = [torch.cat((before, part), dim=1) for before, part in zip(last, mixed[:3], strict=True)]
        one = torch.zeros(whole[0].shape[:2], dtype=torch.int32, device=whole[0].device)
        longer = mixed._replace(q_BSC=whole[0], k_BSC=whole[1], v_BSC=whole[2])
        prepared = _prepared(longer, one, self.key_dim, self.value_dim)
        newest = Inputs(*(part[:, -1:] for part in prepared))
        for before, part in zip(last, whole, strict=True):
            before.copy_(part[:, 1:])
        return _of_rows(delta_step(newest, state_RKV), len(mixed.q_BSC)).to(mixed.q_BSC.dtype)


@builds(DeltaNetLayer)
def _delta_net(layer: DeltaNetLayer, settings: BlockSettings) -> Built:
    module = DeltaNet(settings.arch, settings.kernel, settings.axes, layer)
    return module, lambda x_BSD, given: module(x_BSD, given.packing, given.cache)


class _Mix(torch.autograd.Function):
    """Convolution and delta rule of whole rows, [B, S, H, V]. The backward keeps the inputs and computes the rest
    again."""

    @staticmethod
    def forward(ctx: Any, document_BS: Tensor, key_dim: int, value_dim: int, *inputs: Tensor) -> Tensor:
        mixed = Mixed(*inputs)

        def forward() -> tuple[Tensor]:
            prepared = _prepared(mixed, document_BS, key_dim, value_dim)
            out, _ = delta_rule(prepared, _by_head(document_BS, mixed))
            return (_of_rows(out, len(document_BS)).to(mixed.q_BSC.dtype),)

        (out_BSHV,) = as_one("attention", forward)
        ctx.save_for_backward(document_BS, *inputs)
        ctx.widths = key_dim, value_dim
        return out_BSHV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        document_BS, *saved = ctx.saved_tensors
        wanted = ctx.needs_input_grad[3:]
        inputs = [each.detach().requires_grad_(wants) for each, wants in zip(saved, wanted, strict=True)]
        with torch.enable_grad():
            prepared = _prepared(Mixed(*inputs), document_BS, *ctx.widths)
        exact = prepared.v_RTV.dtype
        grad_RTV = grad_outputs[0].to(exact).transpose(1, 2).flatten(0, 1)
        known = Inputs(*(each.detach() for each in prepared))
        grads = delta_rule_gradients(known, _by_head(document_BS, Mixed(*inputs)), grad_RTV)
        asked = [each for each in inputs if each.requires_grad]
        # With frozen parameters, some inputs of the delta rule have no gradient.
        pairs = [(out, grad) for out, grad in zip(prepared, grads, strict=True) if out.requires_grad]
        outputs, slopes = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(outputs, asked, slopes))
        return None, None, None, *(next(found) if wants else None for wants in wanted)


# Compiled, each number of chunks would get a graph of its own.
_mix: Callable[..., Tensor] = torch.compiler.disable(_Mix.apply)  # pyright: ignore[reportAssignmentType]


def _prepared(mixed: Mixed, document_BS: Tensor, key_dim: int, value_dim: int) -> Inputs:
    """Return the inputs of the delta rule, in the format of exact sums: heads of queries and keys have unit length, and
    queries are divided by the root of their width."""
    exact = exact_type(mixed.q_BSC.dtype)
    q, k, v = (F.silu(_convolved(part, weight, document_BS, exact)) for part, weight in mixed.convolved)
    groups = v.shape[-1] * key_dim // (q.shape[-1] * value_dim)

    def heads(flat_BSC: Tensor, width: int, times: int) -> Tensor:
        x_BHSA = flat_BSC.unflatten(-1, (-1, width)).transpose(1, 2)
        return (x_BHSA.repeat_interleave(times, dim=1) if times > 1 else x_BHSA).flatten(0, 1)

    def unit(x: Tensor) -> Tensor:
        return x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()

    decay = -mixed.a_log_H.to(exact).exp() * F.softplus(mixed.a_BSH.to(exact) + mixed.dt_bias_H.to(exact))
    beta = mixed.b_BSH.to(exact).sigmoid()
    return Inputs(
        unit(heads(q, key_dim, groups)) * key_dim**-0.5,
        unit(heads(k, key_dim, groups)),
        heads(v, value_dim, 1),
        decay.transpose(1, 2).flatten(0, 1),
        beta.transpose(1, 2).flatten(0, 1),
    )


def _convolved(x_BSC: Tensor, weight_C1W: Tensor, document_BS: Tensor, exact: torch.dtype) -> Tensor:
    """Return the causal convolution of each channel within documents: the last weight is for the position itself."""
    x_BSC, weight_CW = x_BSC.to(exact), weight_C1W[:, 0].to(exact)
    out_BSC, (width, positions) = x_BSC * weight_CW[:, -1], (weight_CW.shape[1], x_BSC.shape[1])
    for back in range(1, min(width, positions)):
        same_BS = document_BS[:, back:] == document_BS[:, :-back]
        earlier = x_BSC[:, :-back] * same_BS[..., None] * weight_CW[:, -1 - back]
        out_BSC = out_BSC + F.pad(earlier, (0, 0, back, 0))
    return out_BSC


def _tail(x_BSC: Tensor, document_BS: Tensor, count: int) -> Tensor:
    """Return the last `count` positions of each row, zero where they belong to another document than the last one."""
    own_BS = document_BS == document_BS[:, -1:]
    short = max(0, count - x_BSC.shape[1])
    return F.pad(x_BSC * own_BS[..., None], (0, 0, short, 0))[:, x_BSC.shape[1] + short - count :].clone()


def _by_head(document_BS: Tensor, mixed: Mixed) -> Tensor:
    return document_BS.repeat_interleave(mixed.b_BSH.shape[-1], dim=0)


def _of_rows(x_RTV: Tensor, rows: int) -> Tensor:
    return x_RTV.unflatten(0, (rows, -1)).transpose(1, 2)


@lru_cache(maxsize=8)  # all layers of a microbatch ask for the same
def _order(segments: tuple[tuple[int, int, int], ...], ring: int) -> list[list[int]]:
    """Return for each row the positions in the order in which the ranks of a ring have them: of each document an early
    and a late piece (`runtime/feed/collate.py`)."""
    found: list[list[int]] = [[] for _ in range(1 + max(row for row, _, _ in segments))]
    for rank in range(ring):
        for row, first, length in segments:
            size = length // (2 * ring)
            for piece in (rank, 2 * ring - 1 - rank):
                found[row] += range(first + piece * size, first + (piece + 1) * size)
    return found


def _taken(x_BJSA: Tensor, order_BS: Tensor) -> Tensor:
    return x_BJSA.gather(2, order_BS[:, None, :, None].expand_as(x_BJSA))
