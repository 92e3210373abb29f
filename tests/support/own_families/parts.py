"""Model families of a user's own: llama out of pieces, blocks with layers of their own, and one with experts."""

from typing import Annotated

import torch
import torch.nn.functional as F

from xtrain import (
    AttentionLayer,
    Chain,
    ExpertsLayer,
    NormLayer,
    Residual,
    Sum,
    SwiGLULayer,
    at_least,
    family,
    layer,
    pre_norm,
    rms_norm,
    weight,
)


@family
def plain(arch):
    """Llama."""
    return pre_norm(AttentionLayer("self_attn", qk_norm=arch.qk_norm), SwiGLULayer("mlp"))


@family
def sunk(arch, window: Annotated[int, at_least(1), "positions that a query sees"] = 9):
    """Llama with windows, sinks, and scores of another scale."""
    attention = AttentionLayer("self_attn", window=window, sinks=True, scale=0.5)
    return pre_norm(attention, SwiGLULayer("mlp"))


@family
def capped(arch):
    """Llama with capped scores."""
    return pre_norm(AttentionLayer("self_attn", sinks=True, cap=5.0), SwiGLULayer("mlp"))


@layer
def relu_squared(
    x,
    up=weight("width", "dim", cut="column"),
    bend=weight("width", cut="column"),
    down=weight("dim", "width", cut="row", initial="residual"),
    scale=weight("dim"),
    *,
    width: Annotated[int, at_least(2)],
):
    """scale · down(relu(up(x))² · bend)"""
    hidden = F.relu(F.linear(x, up)) ** 2
    return scale * F.linear(hidden * bend, down)


@layer
def gated_norm(x, gain=weight("dim"), gate=weight("dim", "dim"), shift=weight("dim", initial="zeros"), *, eps: float):
    """rmsnorm(x) · sigmoid(gate(x) + shift)"""
    return rms_norm(x, gain, eps) * torch.sigmoid(F.linear(x, gate, shift))


@family
def squared(arch, factor: Annotated[int, at_least(1), "width of the layer, in widths of the stream"] = 3):
    """Squared ReLU (So et al. 2021)."""
    attention = AttentionLayer("self_attn", qk_norm=arch.qk_norm)
    return pre_norm(attention, relu_squared("mlp", width=factor * arch.dim))


@family
def gated(arch, beside: bool = False):
    """Norms with a gate, and both layers side by side if asked for."""
    eps = arch.norm_eps
    attention = Chain.of(gated_norm("attn_norm", eps=eps), AttentionLayer("attn"))
    mlp = Chain.of(gated_norm("mlp_norm", eps=eps), relu_squared("mlp", width=_half(arch.ffn)))
    if beside:
        return Residual.of(Sum.of(attention, mlp))
    return Chain.of(Residual.of(attention), Residual.of(mlp))


def _half(width):
    return width // 2


@family
def routed(arch):
    """Experts behind a norm with a gate."""
    return Chain.of(
        Residual.of(NormLayer("norm"), AttentionLayer("attn", qk_norm=True)),
        Residual.of(gated_norm("gate", eps=arch.norm_eps), ExpertsLayer("mlp")),
    )
