"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads, and optionally queries,
from one narrow vector a position."""

from collections.abc import Iterator, Set
from typing import TYPE_CHECKING

from attrs import evolve

from xtrain.blocks.attention import AttentionLayer, trace_kernel
from xtrain.blocks.block import Layer, norm_weight, not_above_zero, row_bias
from xtrain.blocks.op_trace import TracedTensor
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture, BlockParameter, RotaryAngles

if TYPE_CHECKING:
    from xtrain.blocks.tracer import Tracer


@frozen(kw_only=True)
class LatentAttentionLayer(Layer):
    """Multi-head latent attention.

    q_rank: rank of the query projection; None: queries come straight from the residual stream. kv_rank: rank of the
    joint projection of keys and values. nope_dim, rope_dim: widths of the parts of a query without and with rotary
    positions. value_dim: width of a value. scale: factor of query-key products. interleaved: rotary positions turn
    adjacent numbers; otherwise a number of the first half with one of the second. bias: on the matrices to the narrow
    vectors and on the output.

    Kernels compute heads of one width, `head_dim`, the larger of the query and value widths; the other is padded with
    zeros.
    """

    attends = True
    adapts = True

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    interleaved: bool = True
    bias: bool = False

    @classmethod
    def torch_module(cls) -> str:
        return "xtrain.runtime.nn.latent_attention"  # which only ranks with such layers load

    def unfit(self, arch: Architecture) -> str | None:
        sizes = ("q_rank", "kv_rank", "nope_dim", "rope_dim", "value_dim", "scale")
        if (problem := not_above_zero(self, *sizes)) is not None:
            return problem
        if self.rope_dim % 2:
            return f"`rope_dim` is {self.rope_dim}, and must be even"
        width = max(self.query_dim, self.value_dim)
        if width == arch.head_dim:
            return None
        return f"heads of `{self.name}` have {width} numbers, and `head_dim` is {arch.head_dim}"

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    def parameters(self, arch: Architecture) -> Iterator[BlockParameter]:
        queries, values = arch.heads * self.query_dim, arch.heads * self.value_dim
        if self.q_rank is None:
            yield self._matrix("q_proj", queries, arch.dim, cut=True)
        else:
            yield from self._narrow("q_a_proj", self.q_rank, arch.dim)
            yield norm_weight(f"{self.name}.q_a_layernorm", self.q_rank, "by_position")
            yield self._matrix("q_b_proj", queries, self.q_rank, cut=True)
        yield from self._narrow("kv_a_proj_with_mqa", self.kv_rank + self.rope_dim, arch.dim)
        # A rank has used it for its own heads.
        yield norm_weight(f"{self.name}.kv_a_layernorm", self.kv_rank, "always")
        yield self._matrix("kv_b_proj", arch.heads * self.nope_dim + values, self.kv_rank, cut=True)
        yield BlockParameter(
            name=f"{self.name}.o_proj.weight", shape=(arch.dim, values), decays=True, initial="residual", cut="row"
        )
        if self.bias:
            yield row_bias(f"{self.name}.o_proj", arch.dim)

    def _matrix(self, name: str, outputs: int, inputs: int, *, cut: bool) -> BlockParameter:
        return BlockParameter(
            name=f"{self.name}.{name}.weight",
            shape=(outputs, inputs),
            decays=True,
            initial="normal",
            cut="column" if cut else None,
            partial="never" if cut else "by_position",
        )

    def _narrow(self, name: str, outputs: int, inputs: int) -> Iterator[BlockParameter]:
        """Yield a matrix that every rank holds whole, for its own positions."""
        yield self._matrix(name, outputs, inputs, cut=False)
        if self.bias:
            yield row_bias(f"{self.name}.{name}", outputs)

    def words(self, arch: Architecture) -> tuple[str, ...]:
        return (f"latent attention through {self.kv_rank}",)

    def angles(self, arch: Architecture) -> RotaryAngles:
        return evolve(arch.angles, width=self.rope_dim)

    def pair_flops(self, arch: Architecture) -> int:
        return 2 * arch.heads * (self.query_dim + self.value_dim)

    def cached(self, arch: Architecture, tp: int, positions: int, plain: Set[str], exact: int = 1) -> int:
        """Return the numbers cached for `positions` positions: the narrow vector and the shared part of keys if
        `kv_b_proj` can be multiplied with queries and with sums of narrow vectors; otherwise a key and a value of
        each head."""
        if f"{self.name}.kv_b_proj.weight" in plain:
            return (self.kv_rank + self.rope_dim) * positions
        return 2 * arch.heads // tp * arch.head_dim * positions

    def trace(self, on: "Tracer", x: TracedTensor) -> TracedTensor:
        ops, local = on.ops, on.local
        number = local.tokens * local.heads * local.width  # bytes of one number of every head
        wide = number * local.head_dim
        kv = on.linear(x, f"{self.name}.kv_a_proj_with_mqa", local.between)
        kv = on.column_parallel_input(kv, self.kv_rank + self.rope_dim)
        each = local.tokens * local.width
        latent, shared_key = ops.split(kv, each * self.kv_rank, each * self.rope_dim)
        latent = on.norm(latent, f"{self.name}.kv_a_layernorm", local.tokens)
        expanded = on.linear(latent, f"{self.name}.kv_b_proj", local.tokens)
        keys, v = ops.split(expanded, number * self.nope_dim, number * self.value_dim)
        q, narrow = self._queries(on, x)
        chosen, turned = self._chosen(on, x, narrow), number * self.rope_dim
        q = ops.op(q, makes=wide, scratch=(7 * turned // 2, 3 * turned), named=(q, kv, latent))
        turned = each * self.rope_dim
        k = ops.op(keys, shared_key, makes=wide, scratch=(7 * turned // 2, 3 * turned), named=(expanded,))
        if self.value_dim < local.head_dim:
            v = ops.op(v, makes=wide)
        out = self._attend(on, (q, k, v), chosen)
        if self.value_dim < local.head_dim:
            out = ops.op(out, makes=number * self.value_dim)
        return on.row_parallel_linear(out, f"{self.name}.o_proj", local.tokens)

    def _queries(self, on: "Tracer", x: TracedTensor) -> tuple[TracedTensor, TracedTensor]:
        """Record queries of all heads; return them, and what they are projected from."""
        local = on.local
        if self.q_rank is None:
            whole = on.column_parallel_input(x)
            return on.linear(whole, f"{self.name}.q_proj", local.tokens), whole
        latent = on.linear(x, f"{self.name}.q_a_proj", local.between)
        latent = on.norm(latent, f"{self.name}.q_a_layernorm", local.between)
        latent = on.column_parallel_input(latent, self.q_rank)
        return on.linear(latent, f"{self.name}.q_b_proj", local.tokens), latent

    def _chosen(self, on: "Tracer", x: TracedTensor, narrow: TracedTensor) -> tuple[TracedTensor, ...]:
        """Record the choice of the positions that each query sees, and return it with the values that it follows from;
        (): all earlier ones. narrow: what queries are projected from."""
        return ()

    def _attend(self, on: "Tracer", parts: tuple[TracedTensor, ...], chosen: tuple[TracedTensor, ...]) -> TracedTensor:
        """Record attention. parts: queries, keys and values. chosen: of `_chosen`."""
        return trace_kernel(AttentionLayer(self.name), on, parts)
