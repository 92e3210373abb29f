"""Mamba-2 mixer (Dao and Gu 2024, arXiv 2405.21060) as Nemotron-H has it.

Values, write and read vectors pass a short causal convolution; each head has a state of state_dim times head_dim, which
replaces a cache of keys and values.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from xtrain.blocks.block import later, norm_weight, not_above_zero, row_bias
from xtrain.blocks.op_trace import TracedTensor
from xtrain.blocks.recurrent import CHUNK, RecurrentLayer
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture, BlockParameter

if TYPE_CHECKING:
    from xtrain.blocks.tracer import Tracer


@frozen(kw_only=True)
class Mamba2Layer(RecurrentLayer):
    """Mamba-2 mixer. Each of `groups` write and read vectors serves heads / groups consecutive heads.

    head_dim: width of a head. state_dim: width of a write or read vector. least_step, most_step: bounds of the step
    size; None: no upper bound. conv_bias: on the convolution. bias: on the matrices; output_bias: on the one after the
    mixer, None: as `bias`. factors: of the gate, the values, the write and read vectors and the step sizes.

    norm: `gated`: the output is multiplied by the SiLU of the gate and then normalized, each group by itself; `first`:
    normalized and then multiplied; `none`: multiplied alone.
    """

    groups: int
    heads: int
    head_dim: int
    state_dim: int
    least_step: float = 0.0
    most_step: float | None = None
    conv_bias: bool = True
    bias: bool = False
    output_bias: bool | None = later(None)
    factors: tuple[float, ...] = later((1.0,) * 5)
    norm: Literal["gated", "first", "none"] = later("gated")

    @property
    def has_output_bias(self) -> bool:
        return self.bias if self.output_bias is None else self.output_bias

    def unfit(self, arch: Architecture) -> str | None:
        if (problem := not_above_zero(self, "groups", "heads", "head_dim", "state_dim", "kernel")) is not None:
            return problem
        if self.heads % self.groups:
            return f"`heads` is {self.heads}, which `groups` {self.groups} does not divide"
        if self.least_step < 0 or (self.most_step is not None and self.most_step < self.least_step):
            return f"`least_step` {self.least_step:g} is below 0 or above `most_step`"
        return None

    @classmethod
    def torch_module(cls) -> str:
        return "xtrain.runtime.nn.mamba2"  # which only ranks with such layers load

    def convolved(self) -> Sequence[tuple[str, int, int]]:
        vectors = self.groups * self.state_dim
        return (("x", self.outputs(), self.heads), ("b", vectors, self.groups), ("c", vectors, self.groups))

    def state(self) -> int:
        return self.state_dim * self.outputs()

    def maps(self) -> int:
        return self.heads

    def moving(self) -> int:
        return self.channels + self.heads

    def outputs(self) -> int:
        return self.heads * self.head_dim

    def parameters(self, arch: Architecture) -> Iterator[BlockParameter]:
        # Modules list their own parameters before the parameters of child modules.
        yield from self.of_heads([("dt_bias", self.heads, "softplus"), ("A_log", self.heads, "log_uniform")])
        yield from self.of_heads([("D", self.heads, "ones")])
        widths = (("z", self.outputs(), self.heads), *self.convolved(), ("dt", self.heads, self.heads))
        yield from self.projections(arch, widths, bias=self.bias)
        yield from self.convolutions(bias=self.conv_bias)
        if self.norm != "none":
            yield norm_weight(f"{self.name}.norm", self.outputs(), cut="column")
        yield self.output(arch, self.heads)
        if self.has_output_bias:
            yield row_bias(f"{self.name}.out_proj", arch.dim)

    def words(self, arch: Architecture) -> tuple[str, ...]:
        return (f"Mamba-2 of {self.heads} heads, {self.state_dim} × {self.head_dim}",)

    def spread_heads(self, arch: Architecture) -> tuple[int, str] | None:
        return self.groups, "groups of Mamba-2 mixers"

    def position_flops(self, arch: Architecture) -> int:
        """Return the forward FLOPs of one position: products within its chunk, and two with the state."""
        within = 2 * CHUNK * (self.groups * self.state_dim + self.outputs())
        return within + 4 * self.state_dim * self.outputs()

    def trace(self, on: "Tracer", x: TracedTensor) -> TracedTensor:
        ops, local, name = on.ops, on.local, self.name
        x = on.column_parallel_input(x)
        z, *parts = (on.linear(x, f"{name}.{each}_proj", local.tokens) for each in ("z", "x", "b", "c", "dt"))
        kinds = ("weight", "bias") if self.conv_bias else ("weight",)
        names = (*(f"{part}_conv.{kind}" for kind in kinds for part in "xbc"), "dt_bias", "A_log", "D")
        out = self.mixed(on, z.size, parts, names)
        parts_of_rows = self.groups * z.size // (local.tokens * self.outputs() * local.width)
        if self.norm == "first":
            out = on.norm(out, f"{name}.norm", local.tokens, parts=parts_of_rows)
        z = z if self.factors[0] == 1 else ops.op(z, makes=z.size)
        share = ops.op(z, makes=z.size, keeps=(z,))
        out = ops.op(out, share, makes=out.size, keeps=(out, share))
        if self.norm == "gated":
            out = on.norm(out, f"{name}.norm", local.tokens, parts=parts_of_rows)
        return on.row_parallel_linear(out, f"{name}.out_proj", local.tokens)

    def scratch(self, numbers: int, exact: int, chunks: int, *, cast: bool) -> tuple[int, int]:
        v, heads, share = numbers * exact, self.heads // self.groups, 2 if cast else 1
        one, k = v // self.head_dim, v * self.groups * self.state_dim // self.outputs()
        pairs, states = one * CHUNK, v * self.state_dim // CHUNK
        # Heads of one group, and groups of one head, lie as the products need them.
        by_group, by_head = v * (self.groups > 1), v * (heads > 1)
        turned = max(by_head + v, pairs // heads) + pairs
        forward = 2 * v + 2 * k + 4 * one + max(turned, max(v, 2 * states // chunks) + v + states)
        within = 6 * one + 2 * by_head + 3 * pairs + pairs // heads
        scanned = 12 * one + 2 * k + 2 * states + max(v, 2 * states // chunks)
        backward = 4 * v + by_group + 4 * k + v * cast + max(within, scanned, (6 + cast) * k)
        return forward - v // share, backward - (v + 2 * k + one) // share
