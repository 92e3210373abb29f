"""Gated delta-net mixer (Yang et al. 2024, arXiv 2412.06464) as Qwen3-Next and Qwen3.5 have it.

Queries, keys and values pass a short causal convolution; each value head has a state of key width times value width,
which replaces a cache of keys and values.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from xtrain.blocks.block import norm_weight, not_above_zero
from xtrain.blocks.op_trace import TracedTensor
from xtrain.blocks.recurrent import CHUNK, RecurrentLayer
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture, BlockParameter

if TYPE_CHECKING:
    from xtrain.blocks.tracer import Tracer


@frozen(kw_only=True)
class DeltaNetLayer(RecurrentLayer):
    """Gated delta net.

    key_heads, value_heads: each query and key serves value_heads / key_heads consecutive value heads. key_dim,
    value_dim: widths of a query or key and of a value.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    def unfit(self, arch: Architecture) -> str | None:
        sizes = ("key_heads", "value_heads", "key_dim", "value_dim", "kernel")
        if (problem := not_above_zero(self, *sizes)) is not None:
            return problem
        if self.value_heads % self.key_heads:
            return f"`value_heads` is {self.value_heads}, which `key_heads` {self.key_heads} does not divide"
        return None

    @classmethod
    def torch_module(cls) -> str:
        return "xtrain.runtime.nn.delta_net"  # which only ranks with such layers load

    def convolved(self) -> Sequence[tuple[str, int, int]]:
        keys = self.key_heads * self.key_dim
        return (("q", keys, self.key_heads), ("k", keys, self.key_heads), ("v", self.outputs(), self.value_heads))

    def state(self) -> int:
        return self.value_heads * self.key_dim * self.value_dim

    def maps(self) -> int:
        return self.value_heads * self.key_dim**2

    def moving(self) -> int:
        return self.channels + 2 * self.value_heads

    def outputs(self) -> int:
        return self.value_heads * self.value_dim

    def parameters(self, arch: Architecture) -> Iterator[BlockParameter]:
        # Modules list their own parameters before the parameters of child modules.
        heads = self.value_heads
        yield from self.of_heads([("dt_bias", heads, "ones"), ("A_log", heads, "log_uniform")])
        further = (("z", self.outputs(), heads), ("b", heads, heads), ("a", heads, heads))
        yield from self.projections(arch, (*self.convolved(), *further))
        yield from self.convolutions()
        yield norm_weight(f"{self.name}.norm", self.value_dim, "always")  # a rank has used it on its own heads
        yield self.output(arch, heads)

    def words(self, arch: Architecture) -> tuple[str, ...]:
        return (f"gated delta net of {self.value_heads} heads, {self.key_dim} × {self.value_dim}",)

    def spread_heads(self, arch: Architecture) -> tuple[int, str] | None:
        return self.key_heads, "key heads of delta nets"

    def position_flops(self, arch: Architecture) -> int:
        """Return the forward FLOPs of one position: products within its chunk, and three with the state."""
        within = 4 * CHUNK * self.key_dim + 2 * CHUNK * self.value_dim
        return self.value_heads * (within + 6 * self.key_dim * self.value_dim)

    def trace(self, on: "Tracer", x: TracedTensor) -> TracedTensor:
        ops, local, name = on.ops, on.local, self.name
        x = on.column_parallel_input(x)
        q, k, v, z, b, a = (on.linear(x, f"{name}.{each}_proj", local.tokens) for each in "qkvzba")
        names = ("dt_bias", "A_log", *(f"{part}_conv.weight" for part in "qkv"))
        out = self.mixed(on, v.size, (q, k, v, b, a), names)
        heads = z.size // (local.tokens * self.value_dim * local.width)
        out = on.norm(out, f"{name}.norm", local.tokens * heads)
        share = ops.op(z, makes=z.size, keeps=(z,))
        out = ops.op(out, share, makes=out.size, keeps=(out, share))
        return on.row_parallel_linear(out, f"{name}.out_proj", local.tokens)

    def scratch(self, numbers: int, exact: int, chunks: int, *, cast: bool) -> tuple[int, int]:
        one, heads, share = numbers // self.value_dim * exact, self.value_heads // self.key_heads, 2 if cast else 1
        k, v, c, shared = one * self.key_dim, one * self.value_dim, one * CHUNK, one * self.key_dim // heads
        states = k * self.value_dim // CHUNK
        solving = 4 * c + c // exact + 4 * k + 2 * v + 7 * one
        scanning = 3 * c + 5 * k + 3 * v + 5 * one + states
        known = 3 * (k + v) + 2 * shared + 10 * one + v * cast
        backward = known + max(
            12 * k + v + 9 * c + 3 * one,
            9 * k + v + 11 * c + 3 * one,
            9 * k + 3 * v + 9 * c + 5 * one,
            5 * k + 3 * v + 4 * c + 2 * one + 3 * states,
        )
        return max(solving, scanning) - v // share, backward - (2 * shared + v + 2 * one) // share
