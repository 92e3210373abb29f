"""DeepSeek sparse attention (DeepSeek-V3.2-Exp, 2025): latent attention over the positions that an indexer scores
highest.

The score of position s for the query at position t is I_ts = Σ_j w_tj · relu(q_tj · k_s), with index heads j: queries
of the index heads come from the narrow vector of the attention's queries, keys and the weights w from the residual
stream.
"""

from collections.abc import Iterator, Set
from typing import TYPE_CHECKING

from xtrain.blocks.attention import TILE
from xtrain.blocks.block import later
from xtrain.blocks.latent_attention import LatentAttentionLayer
from xtrain.blocks.op_trace import ATTENTION, CP, CollectiveCall, TracedTensor
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture, BlockParameter

if TYPE_CHECKING:
    from xtrain.blocks.tracer import Tracer


@frozen(kw_only=True)
class SparseLatentAttentionLayer(LatentAttentionLayer):
    """Latent attention in which a query sees `chosen` positions of its document at most, which have the highest
    scores of the indexer; of equal scores, earlier positions first.

    index_heads, index_dim: number and width of index heads, the first `rope_dim` numbers of which are rotated.
    index_interleaved: rotary positions turn adjacent numbers there. The indexer has no gradient: a choice has none, and
    no loss trains it. Rows of at most `chosen` positions are computed without it.

    gives, takes: name of the chosen positions, as in `Layer`. A layer that takes them has no indexer.
    """

    whole_rows = True

    index_heads: int
    index_dim: int
    chosen: int
    index_interleaved: bool = later(False)
    gives: str = later("")  # pyright: ignore[reportIncompatibleVariableOverride]
    takes: str = later("")  # pyright: ignore[reportIncompatibleVariableOverride]

    @classmethod
    def torch_module(cls) -> str:
        return "xtrain.runtime.nn.sparse_attention"

    def unfit(self, arch: Architecture) -> str | None:
        for name in ("index_heads", "index_dim", "chosen"):
            if getattr(self, name) <= 0:
                return f"`{name}` is {getattr(self, name)}, and must be above 0"
        if self.q_rank is None:
            return "the indexer takes the narrow vector of queries, and `q_rank` is none"
        if self.index_dim < self.rope_dim:
            return f"`index_dim` is {self.index_dim}, and {self.rope_dim} numbers of it are rotated"
        return super().unfit(arch)

    def parameters(self, arch: Architecture) -> Iterator[BlockParameter]:
        yield from super().parameters(arch)
        if self.takes:
            return
        assert self.q_rank is not None
        for name, outputs, inputs in (
            ("wq_b", self.index_heads * self.index_dim, self.q_rank),
            ("wk", self.index_dim, arch.dim),
            ("weights_proj", self.index_heads, arch.dim),
        ):
            yield self._of_indexer(f"{name}.weight", outputs, inputs)
            if name == "wk":
                yield self._of_indexer("k_norm.weight", self.index_dim)
                yield self._of_indexer("k_norm.bias", self.index_dim)

    def _of_indexer(self, name: str, *shape: int) -> BlockParameter:
        initial = "normal" if len(shape) > 1 else "ones" if name.endswith("weight") else "zeros"
        return BlockParameter(
            name=f"{self.name}.indexer.{name}",
            shape=shape,
            decays=len(shape) > 1,
            initial=initial,
            linear=False,
            trained=False,
        )

    def words(self, arch: Architecture) -> tuple[str, ...]:
        source = "of an earlier block" if self.takes else f"by {self.index_heads} index heads"
        further = ("chosen for later blocks",) if self.gives else ()
        return (*super().words(arch), f"{self.chosen:,} positions chosen {source}", *further)

    def pair_flops(self, arch: Architecture) -> int:
        # Of both, forward and backward are counted as three forwards, and the indexer has no backward.
        scores = 0 if self.takes else 2 * self.index_heads * self.index_dim
        return super().pair_flops(arch) + scores // 3

    def cached(self, arch: Architecture, tp: int, positions: int, plain: Set[str], exact: int = 1) -> int:
        keys = 0 if self.takes else self.index_dim * positions
        return super().cached(arch, tp, positions, plain, exact) + keys

    def _chosen(self, on: "Tracer", x: TracedTensor, narrow: TracedTensor) -> TracedTensor | None:
        local = on.local
        if local.sequence <= self.chosen:
            return None
        seen = local.rows * local.sequence**2
        if self.takes:
            kinds = on.resolved.architecture.kinds
            takes = (len(each.layers) for each in kinds if any(it.takes == self.takes for it in each.block.layers()))
            return on.ops.take(self.takes, seen, blocks=sum(takes))[0]
        first = len(on.ops.ops)
        with on.ops.scope():
            q, k, weights = self._indexed(on, on.ops.detached(x), on.ops.detached(narrow))
            for op in on.ops.ops[first:]:
                op.saved, op.results = "", ()
            chosen = self._scored(on, q, k, weights)
        for op in on.ops.ops[first:]:
            op.apart = True
        if self.gives:
            on.ops.give(self.gives, chosen)
        return chosen

    def _indexed(self, on: "Tracer", x: TracedTensor, narrow: TracedTensor) -> tuple[TracedTensor, ...]:
        """Record queries, keys and weights of index heads."""
        ops, local, name = on.ops, on.local, f"{self.name}.indexer"
        each, heads = local.tokens * local.width, self.index_heads
        keys = on.linear(x, f"{name}.wk", local.between)
        norm = tuple(f"{name}.k_norm.{part}" for part in ("weight", "bias"))
        keys = ops.op(keys, makes=keys.size, extra=(2 * local.between * local.exact,), parameters=norm,
            weights=on.bytes_of(*norm))  # fmt: skip
        weights = on.linear(x, f"{name}.weights_proj", local.between)
        joined = ops.op(keys, weights, makes=keys.size + weights.size)
        joined = on.column_parallel_input(joined, self.index_dim + heads)
        k, weights = ops.split(joined, each * self.index_dim, each * heads)
        k = ops.op(k, makes=each * self.index_dim)
        q = on.linear(narrow, f"{name}.wq_b", local.tokens)
        turned = each * heads * self.rope_dim
        q = ops.op(q, makes=q.size, scratch=(7 * turned // 2, 0))
        if on.axes.ulysses > 1:
            size = k.size * on.axes.ulysses
            k = ops.op(k, makes=size, calls=(CollectiveCall("ulysses", "all_gather", CP, size),))
        return q, k, weights

    def _scored(self, on: "Tracer", q: TracedTensor, k: TracedTensor, weights: TracedTensor) -> TracedTensor:
        """Record the scores of some queries at a time, and the choice of the highest."""
        ops, local, heads, spread = on.ops, on.local, self.index_heads, on.axes.ulysses
        own, length = local.sequence // spread, local.sequence
        firsts = range(0, own, TILE)
        blocks = [(min(TILE, own - first), length if spread > 1 else min(first + TILE, own)) for first in firsts]
        most = local.rows * max(queries * keys for queries, keys in blocks)
        pairs = local.rows * sum(queries * keys for queries, keys in blocks)
        numbers = local.tokens * (heads + spread) * self.index_dim
        chosen = ops.op(
            q,
            k,
            weights,
            makes=local.tokens * length,
            scratch=(
                (numbers * local.exact if local.exact != local.width else 0) + most * (heads + 2) * local.exact,
                0,
            ),
            saved=ATTENTION,
            flops=2 * pairs * heads * self.index_dim,
            attends=True,
        )
        if spread == 1:
            return chosen
        size = chosen.size * spread
        return ops.op(chosen, makes=size, calls=(CollectiveCall("ulysses", "all_gather", CP, size),))
