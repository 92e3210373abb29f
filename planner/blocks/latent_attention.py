"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads are made of one narrow
vector a position, and so are queries; a part of each query and key has rotary positions, and that of keys is shared.
"""

from collections.abc import Iterator, Set
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from xtrain.planner.architecture import Architecture, BlockParameter, RotaryAngles
from xtrain.planner.blocks.attention import AttentionLayer, trace_kernel
from xtrain.planner.blocks.block import Layer, row_bias
from xtrain.planner.blocks.norm import norm_weight
from xtrain.planner.costs.op_trace import TracedTensor

if TYPE_CHECKING:
    from xtrain.planner.costs.block_trace import Tracer


@frozen(kw_only=True)
class LatentAttentionLayer(Layer):
    """q_rank: width that queries are projected through; None: they come straight from the residual stream. kv_rank:
    that of keys and values. nope_dim, rope_dim: widths of the parts of a query without and with rotary positions;
    value_dim: that of a value. scale: what products of queries and keys are multiplied by. interleaved: rotary
    positions turn neighbouring numbers; else a number of the first half with one of the second. bias: one on the
    matrices to the narrow vectors, and on what is added to the residual stream.

    Kernels compute heads of one width, `head_dim`, that of queries or of values, whichever is larger; the others are
    padded with zeros.
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
        """A matrix that every rank has all of, for its own positions."""
        yield self._matrix(name, outputs, inputs, cut=False)
        if self.bias:
            yield row_bias(f"{self.name}.{name}", outputs)

    def words(self, arch: Architecture) -> tuple[str, ...]:
        return (f"latent attention through {self.kv_rank}",)

    def angles(self, arch: Architecture) -> RotaryAngles:
        return evolve(arch.angles, width=self.rope_dim)

    def pair_flops(self, arch: Architecture) -> int:
        return 2 * arch.heads * (self.query_dim + self.value_dim)

    def cached(self, arch: Architecture, tp: int, positions: int, plain: Set[str]) -> int:
        """The narrow vector and the shared part of keys, where `kv_b_proj` can be multiplied with queries and with sums
        of narrow vectors; else a key and a value of each of its heads."""
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
        q, turned = self._queries(on, x), number * self.rope_dim
        q = ops.op(q, makes=wide, scratch=(7 * turned // 2, 3 * turned))
        turned = each * self.rope_dim
        k = ops.op(keys, shared_key, makes=wide, scratch=(7 * turned // 2, 3 * turned))
        if self.value_dim < local.head_dim:
            v = ops.op(v, makes=wide)
        out = trace_kernel(AttentionLayer(self.name), on, q, k, v)
        if self.value_dim < local.head_dim:
            out = ops.op(out, makes=number * self.value_dim)
        return on.row_parallel_linear(out, f"{self.name}.o_proj", local.tokens)

    def _queries(self, on: "Tracer", x: TracedTensor) -> TracedTensor:
        local = on.local
        if self.q_rank is None:
            return on.linear(on.column_parallel_input(x), f"{self.name}.q_proj", local.tokens)
        latent = on.linear(x, f"{self.name}.q_a_proj", local.between)
        latent = on.norm(latent, f"{self.name}.q_a_layernorm", local.between)
        return on.linear(on.column_parallel_input(latent, self.q_rank), f"{self.name}.q_b_proj", local.tokens)
