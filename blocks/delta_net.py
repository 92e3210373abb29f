"""Gated delta-net mixer (Yang et al. 2024, arXiv 2412.06464) as Qwen3-Next and Qwen3.5 have it.

Queries, keys and values pass a short causal convolution; each value head has a state of key width times value width,
which replaces a cache of keys and values.
"""

from collections.abc import Iterator, Set
from typing import TYPE_CHECKING, Final

from xtrain.blocks.block import Layer, norm_weight, not_above_zero
from xtrain.blocks.op_trace import ALL_TO_ALL, ATTENTION, CP, CollectiveCall, TracedTensor
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture, BlockParameter, Initial

if TYPE_CHECKING:
    from xtrain.blocks.tracer import Tracer


CHUNK: Final = 64  # positions whose changes of the state are solved together


@frozen(kw_only=True)
class DeltaNetLayer(Layer):
    """Gated delta net.

    key_heads, value_heads: each query and key serves value_heads / key_heads consecutive value heads. key_dim,
    value_dim: widths of a query or key and of a value. kernel: positions of the convolution.

    Tensor parallelism cuts heads. Context parallelism gives each rank whole rows for some of the heads.
    """

    attends = True
    adapts = True
    keeps_state = True

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

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

    def parameters(self, arch: Architecture) -> Iterator[BlockParameter]:
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        # Modules list their own parameters before the parameters of child modules.
        first: tuple[tuple[str, Initial], ...] = (("dt_bias", "ones"), ("A_log", "log_uniform"))
        for name, initial in first:
            yield BlockParameter(
                name=f"{self.name}.{name}", shape=(self.value_heads,), decays=False, initial=initial, cut="column"
            )
        projections = (
            ("q", keys, self.key_heads),
            ("k", keys, self.key_heads),
            ("v", values, self.value_heads),
            ("z", values, self.value_heads),
            ("b", self.value_heads, self.value_heads),
            ("a", self.value_heads, self.value_heads),
        )
        for name, width, heads in projections:
            yield BlockParameter(
                name=f"{self.name}.{name}_proj.weight",
                shape=(width, arch.dim),
                decays=True,
                initial="normal",
                cut="column",
                heads=heads,
            )
        for name, width, heads in projections[:3]:
            yield BlockParameter(
                name=f"{self.name}.{name}_conv.weight",
                shape=(width, 1, self.kernel),
                decays=True,
                initial="normal",
                cut="column",
                heads=heads,
                linear=False,
            )
        yield norm_weight(f"{self.name}.norm", self.value_dim, "always")  # a rank has used it on its own heads
        yield BlockParameter(
            name=f"{self.name}.out_proj.weight",
            shape=(arch.dim, values),
            decays=True,
            initial="residual",
            cut="row",
            heads=self.value_heads,
        )

    def words(self, arch: Architecture) -> tuple[str, ...]:
        return (f"gated delta net of {self.value_heads} heads, {self.key_dim} × {self.value_dim}",)

    def spread_heads(self, arch: Architecture) -> int:
        return self.key_heads

    def position_flops(self, arch: Architecture) -> int:
        """Return the forward FLOPs of one position: products within its chunk, and three with the state."""
        within = 4 * CHUNK * self.key_dim + 2 * CHUNK * self.value_dim
        return self.value_heads * (within + 6 * self.key_dim * self.value_dim)

    def cached(self, arch: Architecture, tp: int, positions: int, plain: Set[str], exact: int = 1) -> int:
        state = self.value_heads * self.key_dim * self.value_dim
        rows = 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
        return (exact * state + (self.kernel - 1) * rows) // tp

    def trace(self, on: "Tracer", x: TracedTensor) -> TracedTensor:
        ops, local, name = on.ops, on.local, self.name
        x = on.column_parallel_input(x)
        q, k, v, z, b, a = (on.linear(x, f"{name}.{each}_proj", local.tokens) for each in "qkvzba")
        out = self._mixed(on, q, k, v, b, a)
        heads = z.size // (local.tokens * self.value_dim * local.width)
        out = on.norm(out, f"{name}.norm", local.tokens * heads)
        share = ops.op(z, makes=z.size, keeps=(z,))
        out = ops.op(out, share, makes=out.size, keeps=(out, share))
        return on.row_parallel_linear(out, f"{name}.out_proj", local.tokens)

    def _mixed(self, on: "Tracer", *parts: TracedTensor) -> TracedTensor:
        """Record the convolution and the delta rule, whose backward computes all but its inputs again."""
        ops, local, axes, made = on.ops, on.local, on.axes, parts[2].size
        groups = [(axis, ranks) for axis, ranks in (("ulysses", axes.ulysses), ("ring", axes.ring)) if ranks > 1]
        if groups:
            size = sum(part.size for part in parts)
            joined = ops.op(*parts, makes=size)
            for axis, _ in groups:
                joined = self._exchanged(on, joined, axis)
            parts = (joined,)
        names = [f"{self.name}.{each}" for each in ("dt_bias", "A_log", *(f"{part}_conv.weight" for part in "qkv"))]
        numbers = made // local.width
        heads = numbers // self.value_dim  # positions times value heads, as all ranks share them
        flops = heads // self.value_heads * self.position_flops(on.resolved.architecture)
        channels = 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
        flops += 2 * heads * self.kernel * channels // self.value_heads
        out = ops.op(
            *parts,
            makes=made,
            keeps=parts,
            weights=on.bytes_of(*names),
            parameters=names,
            scratch=self._scratch(heads, local.exact, cast=local.exact != local.width),
            saved=ATTENTION,
            flops=flops,
            apart=True,
        )
        for axis, _ in reversed(groups):
            out = self._exchanged(on, out, axis)
        return out

    def _scratch(self, count: int, exact: int, *, cast: bool) -> tuple[int, int]:
        """Return the bytes that a forward and a backward need in addition to inputs, outputs and gradients, as
        `runtime/nn/delta_rule.py` frees them. count: positions times value heads. cast: the inputs have another format
        than exact sums."""
        one, heads = count * exact, self.value_heads // self.key_heads
        k, v, c, shared = one * self.key_dim, one * self.value_dim, one * CHUNK, one * self.key_dim // heads
        states, moved = k * self.value_dim // CHUNK, (self.kernel - 1) * (2 * shared + v)
        inputs = 0 if cast else 2 * shared + v
        solving = 4 * c + c // exact + 4 * k + 2 * v + 7 * one
        scanning = 3 * c + 5 * k + 3 * v + 5 * one + states
        known = 3 * (k + v) + 4 * v + 2 * shared + moved + 13 * one + 2 * states + (2 * (shared + v) if cast else 0)
        largest = max(13 * k + 11 * c, 16 * k + 9 * c)
        return max(solving, scanning) + inputs - v, known + largest - 2 * shared - v - 2 * one

    def _exchanged(self, on: "Tracer", x: TracedTensor, axis: str) -> TracedTensor:
        call = CollectiveCall(axis, "all_to_all", CP, x.size)
        sent = on.ops.op(x, makes=x.size, scratch=(x.size, x.size))
        received = on.ops.op(sent, makes=x.size, saved=ALL_TO_ALL, calls=(call,), back_calls=(call,))
        return on.ops.op(received, makes=x.size)
