"""Layers that read this rank's shards of their weights: linear, norm, embedding, SwiGLU, dropout, user layers.

The random bits of dropout and of noise on embeddings (NEFTune, arXiv 2310.05914) depend only on numbers (SplitMix64,
Steele et al. 2014), so that all layouts draw the same.
"""

from collections.abc import Callable
from hashlib import blake2b
from typing import Any, Final, Self

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import _StopRecomputationError

from xtrain.blocks.feed_forward import UNGATED
from xtrain.blocks.user_layer import UserFunction, UserLayer
from xtrain.dsl.schema.adapters import DROPOUT_CHUNK
from xtrain.plan.architecture import RotaryAngles
from xtrain.plan.mesh import piece
from xtrain.runtime.base.user_parts import UserPart, failures_of
from xtrain.runtime.nn.axes import Axes, TensorAxis, column_parallel_input, local, row_parallel_output
from xtrain.runtime.nn.fused import Fusible, normed_and_turned, rms_norm, silu_times
from xtrain.runtime.nn.number_formats import QuantisedMatrix, ScaledMatrix, on_device
from xtrain.runtime.nn.recompute import TiledModule


def stream_of(text: str) -> int:
    """Return the key of a named stream."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), signed=True)


def generator_of(name: str, seed: int, device: torch.device) -> torch.Generator:
    """Return the generator of a parameter's initial values."""
    digest = blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    # The top bit stays clear: some generators take signed seeds.
    return torch.Generator(device).manual_seed(int.from_bytes(digest) >> 1)


def splitmix64(numbers: Tensor, key: int | Tensor) -> Tensor:
    """Return the bits at each number's position in the stream `key`, int64; keys are broadcast against numbers."""
    bits = numbers * _signed(0x9E3779B97F4A7C15) + key
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ shifted(bits, shift)) * _signed(factor)
    return bits ^ shifted(bits, 31)


def shifted(bits: Tensor, by: int) -> Tensor:
    """Shift right, with zeros from the left."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


@frozen
class Dropout:
    """Dropout of one matrix. share: of the numbers that are dropped; the others are divided by the rest. stream: of the
    matrix."""

    share: float
    stream: int

    @classmethod
    def of(cls, matrix: str, share: float, seed: int) -> "Dropout":
        """Return the dropout of a matrix, by its name."""
        return cls(share, stream_of(f"{seed}:{matrix}"))

    def __call__(self, x_BSD: Tensor, keys_BS: Tensor, first: int) -> Tensor:
        """Drop numbers of x. keys_BS: see `token_keys`. first: index of x's first feature among all features of the
        matrix."""
        return _Dropped.apply(x_BSD, keys_BS, self, first)  # pyright: ignore[reportReturnType]

    def dropped(self, x_BSD: Tensor, keys_BS: Tensor, first: int) -> Tensor:
        out_TD = (x_BSD * (1 / (1 - self.share))).flatten(0, -2)
        features = out_TD.shape[-1]
        numbers_D = torch.arange(first, first + features, device=out_TD.device)
        feature_D = splitmix64(numbers_D, self.stream).to(torch.int32)
        token_T = splitmix64(keys_BS.flatten(), self.stream).to(torch.int32)
        # The lowest of the 2^32 numbers, as int32, are dropped.
        limit = round(self.share * 2**32) - 2**31
        rows = len(token_T) if torch.compiler.is_compiling() else max(1, DROPOUT_CHUNK // features)
        for begin in range(0, len(token_T), rows):
            bits = mixed(token_T[begin : begin + rows, None] + feature_D)
            out_TD[begin : begin + rows].masked_fill_(bits < limit, 0)
        return out_TD.view_as(x_BSD)


def mixed(bits: Tensor) -> Tensor:
    """Mix int32 in place: the last steps of MurmurHash3, in which every bit changes all others."""
    for shift, factor in ((16, -0x7A143595), (13, -0x3D4D51CB)):
        bits ^= (bits >> shift).bitwise_and_((1 << (32 - shift)) - 1)
        bits *= factor
    return bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF))


def token_keys(place_B: Tensor, in_row_BS: Tensor) -> Tensor:
    """Return a number for each token of a run, int64 [B, S]. place_B: place of its row in the run; in_row_BS: its
    position there, or [S] if it is the same in all rows."""
    return splitmix64(in_row_BS, splitmix64(place_B, 0)[:, None])


class _Dropped(torch.autograd.Function):
    """Dropout that saves only the tokens' keys: the backward draws the same numbers again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys_BS: Tensor, how: Dropout, first: int) -> Tensor:
        ctx.save_for_backward(keys_BS)
        ctx.how, ctx.first = how, first
        return how.dropped(x, keys_BS, first)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (keys_BS,) = ctx.saved_tensors
        return ctx.how.dropped(grad_outputs[0], keys_BS, ctx.first), None, None, None


class HasKeys(nn.Module):
    """A module whose block sets the keys of all tokens, keys_BS; None without dropout."""

    keys_BS: Tensor | None = None


class DropsInputs(HasKeys):
    """A module with dropout of its inputs if `dropout` and keys are set."""

    dropout: Dropout | None = None


@frozen
class EmbeddingNoise:
    """Noise, uniform from −most to most. stream: of the seed."""

    most: float
    stream: int

    @classmethod
    def of(cls, most: float, seed: int) -> "EmbeddingNoise":
        return cls(most, stream_of(f"{seed}:embedding"))

    def add(self, x_BSD: Tensor, keys_BS: Tensor) -> Tensor:
        """Add noise to x, in place. keys_BS: see `token_keys`, for its positions."""
        x_TD = x_BSD.detach().view(-1, x_BSD.shape[-1])  # gradients pass through unchanged
        features = x_TD.shape[1]
        feature_D = splitmix64(torch.arange(features, device=x_TD.device), self.stream).to(torch.int32)
        token_T = splitmix64(keys_BS.flatten(), self.stream).to(torch.int32)
        exact = torch.promote_types(x_TD.dtype, torch.float32)
        rows = max(1, DROPOUT_CHUNK // features)
        for begin in range(0, len(token_T), rows):
            bits = mixed(token_T[begin : begin + rows, None] + feature_D)
            x_TD[begin : begin + rows] += (bits.to(exact) * (self.most * 2.0**-31)).to(x_TD.dtype)
        return x_BSD


ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}


class Linear(nn.Linear):
    """x · Wᵀ, and the bias if there is one. `partial` as in `local`. quantised: storage of the matrix, if quantized;
    scaled: its products in fp8 or of the rounded matrix, if it has any."""

    partial = False
    quantised: QuantisedMatrix | None = None
    scaled: ScaledMatrix | None = None

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias=bias)

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else local(self.bias, partial=self.partial)
        return self._product(input, bias)

    def _product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.scaled is not None:
            out = self.scaled.product(x, local(self.weight, partial=self.partial))
            return out if bias is None else out + bias
        if self.quantised is None:
            return F.linear(x, local(self.weight, partial=self.partial), bias)
        out = self.quantised.product(x, local(self.weight), self.quantised.beside(self), torch.matmul, turned=True)
        return out if bias is None else out + bias  # not in place: recomputation may keep the product

    def without_adapters(self, x: Tensor) -> Tensor:
        """Return x · Wᵀ alone, also on an adapter's replacement."""
        return self._product(x)

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """Return the rank's matrix [outputs, inputs]; a quantized one is dequantized."""
        weight = local(self.weight)
        if self.quantised is None:
            return weight
        return self.quantised.values(weight, self.quantised.beside(self), dtype)

    def row_parallel(self, x_BSD: Tensor, tensor: TensorAxis | None) -> Tensor:
        """Return the product of a matrix that tensor parallelism cuts by input.

        The bias is added once, to the sum over ranks; under sequence parallelism each rank has its own positions.
        """
        return self.row_parallel_sum(self.row_parallel_summand(x_BSD, tensor), tensor)

    def row_parallel_summand(self, x_BSD: Tensor, tensor: TensorAxis | None) -> Tensor:
        """Return this rank's summand."""
        return self(x_BSD) if tensor is None or self.bias is None else self.without_bias(x_BSD)

    def row_parallel_sum(self, summand_BSD: Tensor, tensor: TensorAxis | None) -> Tensor:
        """Return the sum of the ranks' summands."""
        out_BSD = row_parallel_output(summand_BSD, tensor)
        return out_BSD if tensor is None or self.bias is None else out_BSD + local(self.bias, partial=tensor.sequence)

    def without_bias(self, x_BSD: Tensor) -> Tensor:
        return self._product(x_BSD)


class RMSNorm(Fusible):
    """RMSNorm with a weight. `partial` as in `local`. by_head: over heads, of which a tensor-parallel rank has its own.
    axes: given if tensor parallelism cuts the rows. plus_one: multiply by 1 + weight. scale: factor of the output.
    part: width of the parts of a row that are normalized by themselves; None: whole rows."""

    partial = False

    def __init__(
        self,
        width: int,
        eps: float,
        *,
        by_head: bool = False,
        axes: Axes | None = None,
        plus_one: bool = False,
        scale: float = 1.0,
        part: int | None = None,
    ) -> None:
        super().__init__()
        self.by_head, self.axes, self.plus_one, self.scale, self.part = by_head, axes, plus_one, scale, part
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        tensor = None if self.axes is None else self.axes.tensor
        group = None if tensor is None else tensor.group
        weight_D = local(self.weight, partial=self.partial)
        if self.part is not None:
            x, weight_PD = x.unflatten(-1, (-1, self.part)), weight_D.view(-1, self.part)
            return rms_norm(x, weight_PD, self.eps, group, self.plus_one, self.scale).flatten(-2)
        return rms_norm(x, weight_D, self.eps, group, self.plus_one, self.scale, fused=self.fused)

    def turned(self, x_BSHA: Tensor, rotate: "Rotation") -> Tensor:
        """Normalize heads and rotate them by their positions, with the fused kernels."""
        weight_A = local(self.weight, partial=self.partial)
        return normed_and_turned(x_BSHA, 1 + weight_A if self.plus_one else weight_A, self.eps, rotate)


class Embedding(nn.Embedding):
    """Embedding table, of which a tensor-parallel rank has some rows: other rows are looked up on their ranks."""

    def __init__(self, vocabulary: int, dim: int, axes: Axes) -> None:
        super().__init__(vocabulary, dim)
        self.axes = axes

    def forward(self, input: Tensor) -> Tensor:
        weight_VD = local(self.weight)
        tensor = self.axes.tensor
        if tensor is None:
            return F.embedding(input, weight_VD, self.padding_idx)
        first = first_row(self.num_embeddings, tensor)
        own_BS = (input >= first) & (input < first + len(weight_VD))
        padding = None if self.padding_idx is None else self.padding_idx - first
        if padding is not None and not 0 <= padding < len(weight_VD):
            padding = None  # another rank has it
        if not len(weight_VD):
            x_BSD = weight_VD.new_zeros(*input.shape, self.embedding_dim) + 0 * weight_VD.sum()
        else:
            places_BS = torch.where(own_BS, input - first, 0)
            x_BSD = F.embedding(places_BS, weight_VD, padding) * own_BS[..., None]
        return row_parallel_output(x_BSD, tensor)


class SwiGLU(TiledModule, Fusible):
    """down(activation(gate_scale · gate(x)) · up(x)) (Shazeer 2020), or without a gate down(activation(up(x))). With
    `axes`, tensor parallelism cuts its width."""

    def __init__(
        self,
        dim: int,
        ffn: int,
        axes: Axes | None = None,
        *,
        bias: bool = False,
        activation: str = "silu",
        gate_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.axes, self.activation, self.gate_scale = axes, ACTIVATIONS[activation], gate_scale
        self.gate_proj = None if activation in UNGATED else Linear(dim, ffn, bias=bias)
        self.up_proj = Linear(dim, ffn, bias=bias)
        self.down_proj = Linear(ffn, dim, bias=bias)

    def forward(self, x_BSD: Tensor) -> Tensor:
        tensor = self._tensor
        return self.down_proj.row_parallel_sum(self.in_pieces(column_parallel_input(x_BSD, tensor)), tensor)

    def of_piece(self, x_BSD: Tensor) -> Tensor:
        if self.gate_proj is None:
            hidden_BSF = self.activation(self.up_proj(x_BSD))
        elif self.fused and self.activation is F.silu:
            hidden_BSF = silu_times(self._gate(x_BSD), self.up_proj(x_BSD))
        else:
            hidden_BSF = self.activation(self._gate(x_BSD)) * self.up_proj(x_BSD)
        return self.down_proj.row_parallel_summand(hidden_BSF, self._tensor)

    def _gate(self, x_BSD: Tensor) -> Tensor:
        assert self.gate_proj is not None
        gate_BSF = self.gate_proj(x_BSD)
        return gate_BSF if self.gate_scale == 1 else gate_BSF * self.gate_scale

    @property
    def _tensor(self) -> TensorAxis | None:
        return None if self.axes is None else self.axes.tensor


@frozen
class _ScaledFrequencies:
    """Frequencies [A / 2] of scaled angles, which Python computes: copied to a device once, as a copy from the host's
    memory waits for everything that the device has yet to compute."""

    angles: RotaryAngles
    dtype: torch.dtype

    def __call__(self) -> Tensor:
        return torch.tensor(self.angles.rope.frequencies(self.angles.width, self.angles.theta), dtype=self.dtype)


@frozen(eq=False)
class Rotation:
    """Cosine and sine of every position's angles, each [B, 1, S, A]; computed once per forward for all blocks with the
    same angles. Of wider heads the first A numbers are rotated. grown: the same times a factor for each position, for
    queries."""

    cos: Tensor
    sin: Tensor
    grown: "Rotation | None" = None

    @classmethod
    def of(cls, positions_BS: Tensor, angles: RotaryAngles, dtype: torch.dtype) -> "Rotation":
        # Angles are in fp64 when the model is, else in fp32: a bf16 angle is wrong by whole turns at long positions.
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        width, theta, rope = angles.width, angles.theta, angles.rope
        if rope.scaling == "none":
            frequencies = theta ** (-torch.arange(0, width, 2, device=positions_BS.device, dtype=exact) / width)
        else:
            frequencies = on_device(_ScaledFrequencies(angles, exact), positions_BS)
        angle = positions_BS.to(exact)[:, None, :, None] * frequencies
        angle = torch.cat((angle, angle), dim=-1)
        cos, sin = angle.cos(), angle.sin()
        if rope.magnitude != 1:
            cos, sin = cos * rope.magnitude, sin * rope.magnitude
        grown = None
        if angles.growth:
            steps_B1S1 = (positions_BS // rope.original).to(exact)[:, None, :, None]
            factor_B1S1 = 1 + angles.growth * steps_B1S1.log1p()
            grown = cls(cos=(cos * factor_B1S1).to(dtype), sin=(sin * factor_B1S1).to(dtype))
        return cls(cos=cos.to(dtype), sin=sin.to(dtype), grown=grown)

    @property
    def of_queries(self) -> "Rotation":
        return self.grown or self

    @property
    def width(self) -> int:
        """Numbers of a head that are rotated."""
        return self.cos.shape[-1]

    def __call__(self, x_BHSA: Tensor, *, interleaved: bool = False) -> Tensor:
        """Rotate heads. interleaved: pairs of adjacent numbers are moved into halves first: products of queries and
        keys stay the same."""
        if self.width == x_BHSA.shape[-1] and not interleaved:
            return self._turned(x_BHSA)
        first = x_BHSA[..., : self.width]
        if interleaved:
            first = first.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        parts = self._turned(first), x_BHSA[..., self.width :]
        return torch.cat([part.transpose(1, 2) for part in parts], dim=-1).transpose(1, 2)  # heads side by side

    def _turned(self, x_BHSA: Tensor) -> Tensor:
        left, right = x_BHSA.chunk(2, dim=-1)
        return x_BHSA * self.cos + torch.cat((-right, left), dim=-1) * self.sin


def first_row(extent: int, tensor: TensorAxis | None) -> int:
    """Return the first row of this rank's piece of `extent` rows."""
    return 0 if tensor is None else tensor.group.rank() * piece(extent, tensor.size, 0)


class WeightHolder(nn.Module):
    """A parameter under a name of its own, so that tensor parallelism can cut it separately. bias: there is also one
    for each row."""

    def __init__(self, shape: tuple[int, ...], *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(shape[0])) if bias else None


class ExactBuffers(nn.Module):
    """A module whose buffers stay in fp32 or fp64, whatever the format of the model."""

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        for name, buffer in self._buffers.items():
            if buffer is not None and buffer.dtype not in (torch.float32, torch.float64):
                self._buffers[name] = buffer.float()
        return self


class Factor(ExactBuffers):
    """A `FactorLayer`."""

    def __init__(self) -> None:
        super().__init__()
        self.factor: Tensor
        self.register_buffer("factor", torch.ones(1))

    def forward(self, x_BSD: Tensor) -> Tensor:
        return x_BSD * self.factor.to(x_BSD.dtype)


class OwnModule(nn.Module):
    """Module that computes a user's function with weights of its own, each under its name."""

    def __init__(self, layer: UserFunction, part: UserPart, axes: Axes) -> None:
        super().__init__()
        self.axes, self.part, self.function = axes, part, part.load()
        for weight in layer.weights:
            self.add_module(weight.owner, WeightHolder(weight.shape))

    def _called(self, /, *args: Any, **weights: Any) -> Any:
        """Return the result of the function. Raises PartFailed for what it raises."""
        out: Any = None
        stopped: _StopRecomputationError | None = None
        with failures_of(self.part):
            try:
                out = self.function(*args, **weights, **self.part.arguments)
            except _StopRecomputationError as stop:  # a backward has recomputed everything it needs
                stopped = stop
        if stopped is not None:
            try:
                raise stopped
            finally:
                del stopped  # its traceback refers to this frame and the function's tensors: break the cycle
        return out


def is_like(value: Any, wanted: Tensor) -> bool:
    """Return True if a value is a tensor of the shape and number format of another one."""
    return isinstance(value, Tensor) and value.shape == wanted.shape and value.dtype == wanted.dtype


def type_text(value: Any) -> str:
    """Return the number format and shape of a tensor, or the type of another value."""
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


class OwnLayer(OwnModule, TiledModule):
    """Layer of a user's function on activations [B, S, D]."""

    def __init__(self, layer: UserLayer, part: UserPart, axes: Axes) -> None:
        super().__init__(layer, part, axes)
        self.is_cut, self.tiles = layer.is_cut, layer.tiles
        self.is_whole = {weight.owner: weight.cut is None for weight in layer.weights}

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Compute the layer. Raises PartFailed for what the function raises, and for a result of another shape or
        number format."""
        if not self.is_cut:
            return self.in_pieces(x_BSD)
        tensor = self.axes.tensor
        return row_parallel_output(self.in_pieces(column_parallel_input(x_BSD, tensor)), tensor)

    def of_piece(self, x_BSD: Tensor) -> Tensor:
        tensor = self.axes.tensor
        # Of a weight that is not cut a rank has only a summand of the gradient: of its own matrices, or of its own
        # positions.
        partial = tensor is not None and (self.is_cut or tensor.sequence)
        weights = {
            name: local(getattr(self, name).weight, partial=partial and whole) for name, whole in self.is_whole.items()
        }
        return self._call(x_BSD, weights)

    def _call(self, x_BSD: Tensor, weights: dict[str, Any]) -> Tensor:
        if torch.compiler.is_compiling():
            return self.function(x_BSD, **weights, **self.part.arguments)
        out_BSD = self._called(x_BSD, **weights)
        if not is_like(out_BSD, x_BSD):
            raise self.part.failed(f"gave {type_text(out_BSD)} for {type_text(x_BSD)}, not the same")
        return out_BSD
