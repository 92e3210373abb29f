"""Decoder block: the modules of its pieces, and the forward that combines them."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from attrs import frozen
from torch import Tensor, nn

from xtrain.blocks.adapted import AdaptedBlock
from xtrain.blocks.attention import AttentionLayer
from xtrain.blocks.block import (
    BlockPiece,
    Chain,
    FactorLayer,
    JoinLayer,
    Layer,
    NormLayer,
    Residual,
    ScaledChain,
    Sum,
    block_of,
)
from xtrain.blocks.feed_forward import ExpertsLayer, SwiGLULayer
from xtrain.blocks.user_layer import UserFunction, UserLayer
from xtrain.plan.architecture import Architecture, RotaryAngles
from xtrain.runtime.base.ops import PlanMismatch
from xtrain.runtime.base.user_parts import UserPart
from xtrain.runtime.nn.adapters import put_on
from xtrain.runtime.nn.attention import AttentionKernel, AttentionModule
from xtrain.runtime.nn.attention_blocks import Scores
from xtrain.runtime.nn.axes import Axes, column_parallel_input, local
from xtrain.runtime.nn.batch import DocumentLayout, LayerCache
from xtrain.runtime.nn.fused import Fusible, rms_norm, turned
from xtrain.runtime.nn.layers import Factor, HasKeys, Linear, OwnLayer, RMSNorm, Rotation, SwiGLU
from xtrain.runtime.nn.moe import MoE
from xtrain.runtime.nn.recompute import TiledModule


class Attention(AttentionModule, Fusible):
    """Grouped-query attention of an `AttentionLayer`."""

    def __init__(self, arch: Architecture, kernel: AttentionKernel, axes: Axes, layer: AttentionLayer) -> None:
        super().__init__(kernel, axes, Scores(window=layer.window, scale=layer.scale, cap=layer.cap))
        arch = layer.own(arch)
        self.head_dim = arch.head_dim
        queries, keys = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
        self.interleaved = layer.interleaved
        # The fused kernels turn all numbers of a head, in halves.
        self.turns = not layer.interleaved and layer.rotary in (None, arch.head_dim)
        self.gated, self.query_dim = layer.gated, 2 * arch.head_dim if layer.gated else arch.head_dim
        self.q_proj = Linear(arch.dim, arch.heads * self.query_dim, bias=layer.bias)
        self.gives, self.takes = layer.gives, layer.takes
        self.k_proj = None if layer.takes else Linear(arch.dim, keys, bias=layer.bias)
        self.v_proj = None if layer.takes or layer.key_values else Linear(arch.dim, keys, bias=layer.bias)
        self.value_eps = arch.norm_eps if layer.value_norm else None
        self.o_proj = Linear(queries, arch.dim, bias=layer.output_bias)
        self.sinks = nn.Parameter(torch.empty(arch.heads)) if layer.sinks else None
        self.wide_norm = layer.wide_norm

        def norm(width: int) -> nn.Module:
            if not layer.qk_norm:
                return nn.Identity()
            if layer.wide_norm:
                return RMSNorm(width, arch.norm_eps, axes=axes, plus_one=layer.plus_one)
            return RMSNorm(arch.head_dim, arch.norm_eps, by_head=True, plus_one=layer.plus_one)

        self.q_norm, self.k_norm = norm(queries), None if layer.takes else norm(keys)

    def forward(
        self,
        x_BSD: Tensor,
        rotate: Rotation | None,
        packing: DocumentLayout,
        cache: LayerCache | None,
        values: "Values",
    ) -> Tensor:
        def heads(flat: Tensor) -> Tensor:
            return flat.unflatten(-1, (-1, self.head_dim))

        # The number of heads is read from the tensor, so a layer with only some of them needs no change.
        x_BSD = column_parallel_input(x_BSD, self.axes.tensor)

        def positioned(x_BSHA: Tensor, norm: nn.Module, rotate: Rotation | None) -> Tensor:
            if self.wide_norm:
                x_BSHA = heads(norm(x_BSHA.flatten(-2)))
            elif self.fused and self.turns and rotate is not None and isinstance(norm, RMSNorm):
                return norm.turned(x_BSHA, rotate).transpose(1, 2)
            else:
                x_BSHA = norm(x_BSHA)
            if rotate is None:
                return x_BSHA.transpose(1, 2)
            if self.fused and self.turns:
                return turned(x_BSHA, rotate).transpose(1, 2)
            return rotate(x_BSHA.transpose(1, 2), interleaved=self.interleaved)

        q_BSHA, gate_BSHA = self.q_proj(x_BSD).unflatten(-1, (-1, self.query_dim)), None
        if self.gated:
            q_BSHA, gate_BSHA = q_BSHA.chunk(2, dim=-1)
        q_BHSA = positioned(q_BSHA, self.q_norm, None if rotate is None else rotate.of_queries)
        if self.k_proj is None or self.k_norm is None:
            k_BKSA, v_BKSA = values[self.takes]
        else:
            keys_BSKA = heads(self.k_proj(x_BSD))
            v_BSKA = keys_BSKA if self.v_proj is None else heads(self.v_proj(x_BSD))
            k_BKSA = positioned(keys_BSKA, self.k_norm, rotate)
            if self.value_eps is not None:
                v_BSKA = rms_norm(v_BSKA, None, self.value_eps, fused=self.fused)
            v_BKSA = v_BSKA.transpose(1, 2)
            if cache is not None:
                k_BKSA, v_BKSA = cache.extended(self, k_BKSA, v_BKSA, window=self.scores.window)
                if self.gives and cache.filled:  # what a cache returns is valid until the next layer's call
                    k_BKSA, v_BKSA = k_BKSA.clone(), v_BKSA.clone()
        if self.gives:
            values[self.gives] = (k_BKSA, v_BKSA)
        sink_H = None if self.sinks is None else local(self.sinks)
        out_BSHA = self.kernel(q_BHSA, k_BKSA, v_BKSA, packing, self.scores, sink_H).transpose(1, 2)
        if gate_BSHA is not None:
            out_BSHA = out_BSHA * gate_BSHA.sigmoid()
        return self.o_proj.row_parallel(out_BSHA.flatten(-2), self.axes.tensor)


Values = dict[str, tuple[Tensor, ...]]
"""Values of layers that give them to later blocks, by name."""


class BlockInput(NamedTuple):
    """Further inputs of a block's modules. known_BSK: experts to use instead of the router's choices. ids_BS: of tokens
    that a layer embeds. values: those that the block takes, to which its layers add what they give."""

    rotate: Rotation | None
    packing: DocumentLayout
    real_BS: Tensor
    cache: LayerCache | None
    known_BSK: Tensor | None
    ids_BS: Tensor | None
    values: Values


class Join(nn.Module):
    """A `JoinLayer`: a hidden state and the embedding of a later token. embed: ids [B, S] → the residual stream before
    the first block; set by the model."""

    embed: Callable[[Tensor], Tensor]

    def __init__(self, dim: int, eps: float, *, plus_one: bool) -> None:
        super().__init__()
        self.enorm = RMSNorm(dim, eps, plus_one=plus_one)
        self.hnorm = RMSNorm(dim, eps, plus_one=plus_one)
        self.eh_proj = Linear(2 * dim, dim)

    def forward(self, x_BSD: Tensor, ids_BS: Tensor) -> Tensor:
        embedded_BSD = self.enorm(self.embed(ids_BS))
        return self.eh_proj(torch.cat((embedded_BSD, self.hnorm(x_BSD)), dim=-1))


@frozen(eq=False)
class BlockSettings:
    """Settings of a block's modules. rows: of a step, for the means of a router's losses. base: folder that the user's
    modules are relative to. number: of the block."""

    arch: Architecture
    kernel: AttentionKernel
    axes: Axes
    rows: int
    base: Path
    number: int = 0

    def part_of(self, layer: UserFunction) -> UserPart:
        """Return the function of a user's layer."""
        user, arguments = self.arch.own["user"], dict(layer.arguments)
        return UserPart("layer", user["module"], layer.function, user["digest"], arguments, self.base.absolute())


Call = Callable[[Tensor, BlockInput], Tensor]
Built = tuple[nn.Module, Call]
"""A module, and the function that calls it with activations [B, S, D] and returns as many."""

Build = Callable[[Any, BlockSettings], Built]
BUILDERS: Final[dict[type[Layer], Build]] = {}


def builds(layer: type[Layer]) -> Callable[[Build], Build]:
    """Register the function that builds the modules of a class of pieces."""

    def register(build: Build) -> Build:
        BUILDERS[layer] = build
        return build

    return register


@builds(NormLayer)
def _norm(layer: NormLayer, settings: BlockSettings) -> Built:
    module = RMSNorm(settings.arch.dim, settings.arch.norm_eps, plus_one=layer.plus_one, scale=layer.scale)
    return module, lambda x_BSD, _: module(x_BSD)


@builds(FactorLayer)
def _factor(layer: FactorLayer, settings: BlockSettings) -> Built:
    module = Factor()
    return module, lambda x_BSD, _: module(x_BSD)


@builds(AttentionLayer)
def _attention(layer: AttentionLayer, settings: BlockSettings) -> Built:
    module = Attention(settings.arch, settings.kernel, settings.axes, layer)
    return module, lambda x_BSD, given: module(x_BSD, given.rotate, given.packing, given.cache, given.values)


@builds(SwiGLULayer)
def _swiglu(layer: SwiGLULayer, settings: BlockSettings) -> Built:
    ffn = layer.wider * settings.arch.ffn
    how = {"bias": layer.bias, "activation": layer.activation, "gate_scale": layer.gate_scale}
    module = SwiGLU(settings.arch.dim, ffn, settings.axes, **how)
    return module, lambda x_BSD, _: module(x_BSD)


@builds(ExpertsLayer)
def _experts(layer: ExpertsLayer, settings: BlockSettings) -> Built:
    module = MoE(settings.arch, settings.axes, settings.rows, layer)
    return module, lambda x_BSD, given: module(x_BSD, given.real_BS, given.known_BSK)


@builds(JoinLayer)
def _join(layer: JoinLayer, settings: BlockSettings) -> Built:
    module = Join(settings.arch.dim, settings.arch.norm_eps, plus_one=layer.plus_one)

    def call(x_BSD: Tensor, given: BlockInput) -> Tensor:
        assert given.ids_BS is not None
        return module(x_BSD, given.ids_BS)

    return module, call


@builds(UserLayer)
def _of_user(layer: UserLayer, settings: BlockSettings) -> Built:
    module = OwnLayer(layer, settings.part_of(layer), settings.axes)
    return module, lambda x_BSD, _: module(x_BSD)


def built(layer: Layer, settings: BlockSettings) -> Built:
    """Build the module of a piece. Raises PlanMismatch if none is registered."""
    if type(layer) not in BUILDERS:
        importlib.import_module(layer.torch_module())
    if type(layer) not in BUILDERS:
        raise PlanMismatch(f"`{layer.torch_module()}` builds no module for {type(layer).__name__}")
    return BUILDERS[type(layer)](layer, settings)


class LayerBlock(nn.Module):
    """The block of one layer. `recompute`, if set, runs `compute` so that the backward can repeat it.

    number: of its layer. angles: positions that its `rotate` is made from; None: it takes none. dropping: its modules
    with dropout, which takes the tokens' keys. embeds: it takes ids of tokens. gives: it has values for later blocks.
    takes: names of values that it takes from earlier ones, or that its own layers give.
    """

    number: int
    angles: RotaryAngles | None = None
    recompute: Callable[..., Tensor] | None = None
    dropping: list[HasKeys]
    routes = False
    tiled = False
    embeds = False
    gives = False
    takes: tuple[str, ...] = ()


class DecoderBlock(LayerBlock):
    """The decoder block of one layer, built from the pieces of its family."""

    def __init__(
        self, arch: Architecture, layer: int, kernel: AttentionKernel, axes: Axes, rows: int, base: Path | None = None
    ) -> None:
        super().__init__()
        self.number = layer
        block, settings = block_of(arch.kind_of(layer)), BlockSettings(arch, kernel, axes, rows, base or Path(), layer)
        calls: dict[str, Call] = {}
        for piece in block.layers():
            module, calls[piece.name] = built(piece, settings)
            self.add_module(piece.name, module)
        if isinstance(block, AdaptedBlock):
            put_on(self, block, arch, axes)
        self.tasks = axes.tasks
        self.angles = block.angles(arch)
        self._forward = _call_of(block, calls)
        layers = tuple(block.layers())
        self.embeds, self.gives = any(each.embeds for each in layers), any(each.gives for each in layers)
        self.takes = tuple(each.taken(layer) for each in layers if each.takes)
        self.recompute: Callable[..., Tensor] | None = None
        self.dropping: list[HasKeys] = []

    @property
    def routes(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True if it has experts."""
        return any(isinstance(module, MoE) for module in self.children())

    @property
    def tiled(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True if a layer of it computes some positions at a time."""
        return any(isinstance(module, TiledModule) and module.positions is not None for module in self.children())

    def forward(
        self,
        x_BSD: Tensor,
        rotate: Rotation | None,
        packing: DocumentLayout,
        real_BS: Tensor,
        cache: LayerCache | None = None,
        keys_BS: Tensor | None = None,
        known_BSK: Tensor | None = None,
        ids_BS: Tensor | None = None,
        taken: Values | None = None,
    ) -> Tensor | tuple[Tensor, Values]:
        """Compute the block, with what it gives to later blocks if it `gives`. ids_BS, taken: if it `embeds`, and what
        it `takes`."""
        given = (known_BSK, ids_BS, taken)
        if self.recompute is None or cache is not None:
            return self.compute(x_BSD, rotate, packing, real_BS, cache, keys_BS, *given)
        return self.recompute(self.compute, x_BSD, rotate, packing, real_BS, None, keys_BS, *given)

    def compute(
        self,
        x_BSD: Tensor,
        rotate: Rotation | None,
        packing: DocumentLayout,
        real_BS: Tensor,
        cache: LayerCache | None,
        keys_BS: Tensor | None,
        known_BSK: Tensor | None = None,
        ids_BS: Tensor | None = None,
        taken: Values | None = None,
    ) -> Tensor | tuple[Tensor, Values]:
        if self.tasks is not None:  # by the backward, other microbatches have set other rows
            self.tasks.counts = packing.task_rows
        for module in self.dropping:
            module.keys_BS = keys_BS
        taken = taken or {}
        values = dict(taken)
        out_BSD = self._forward(x_BSD, BlockInput(rotate, packing, real_BS, cache, known_BSK, ids_BS, values))
        return (out_BSD, {name: each for name, each in values.items() if name not in taken}) if self.gives else out_BSD


def _call_of(piece: BlockPiece, calls: dict[str, Call]) -> Call:
    """Combine the calls of a piece's modules into one call."""
    if isinstance(piece, Layer):
        return calls[piece.name]
    if not isinstance(piece, Chain):
        raise PlanMismatch(f"a block has no {type(piece).__name__}")
    inner = [_call_of(inner_piece, calls) for inner_piece in piece.pieces]

    def chain(x_BSD: Tensor, given: BlockInput) -> Tensor:
        for call in inner:
            x_BSD = call(x_BSD, given)
        return x_BSD

    def side_by_side(x_BSD: Tensor, given: BlockInput) -> Tensor:
        total_BSD = inner[0](x_BSD, given)
        for call in inner[1:]:
            total_BSD = total_BSD + call(x_BSD, given)
        return total_BSD

    if isinstance(piece, Residual):
        scale = piece.scale
        return lambda x_BSD, given: x_BSD + (chain(x_BSD, given) if scale == 1 else scale * chain(x_BSD, given))
    if isinstance(piece, ScaledChain):
        before, after = piece.before, piece.after

        def scaled(x_BSD: Tensor, given: BlockInput) -> Tensor:
            out_BSD = chain(x_BSD if before == 1 else x_BSD * before, given)
            return out_BSD if after == 1 else out_BSD * after

        return scaled
    return side_by_side if isinstance(piece, Sum) else chain
