"""DeepSeek sparse attention (DeepSeek-V3.2-Exp, 2025): latent attention over the positions that an indexer scores
highest.

The score of position s for the query at position t is I_ts = Σ_j w_tj · relu(q_tj · k_s), with index heads j: queries
of the index heads come from the narrow vector of the attention's queries, keys and the weights w from the residual
stream.
"""

from collections.abc import Iterator, Sequence, Set
from typing import TYPE_CHECKING

from xtrain.blocks.attention import TILE, trace_selected
from xtrain.blocks.block import later
from xtrain.blocks.latent_attention import LatentAttentionLayer
from xtrain.blocks.op_trace import ATTENTION, CP, INDEX, TP, CollectiveCall, TracedOp, TracedTensor
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import INDEXER, Architecture, BlockParameter

if TYPE_CHECKING:
    from xtrain.blocks.tracer import Tracer


@frozen(kw_only=True)
class SparseLatentAttentionLayer(LatentAttentionLayer):
    """Latent attention in which a query sees `chosen` positions of its document at most, which have the highest
    scores of the indexer; of equal scores, earlier positions first.

    index_heads, index_dim: number and width of index heads, the first `rope_dim` numbers of which are rotated.
    index_interleaved: rotary positions turn adjacent numbers there. index_loss: weight of the indexer's loss, the
    divergence of its scores from the attention; the indexer learns from it alone, and has no gradient without it: a
    choice has none. Rows of at most `chosen` positions are then computed without it.

    gives, takes: name of the chosen positions, as in `Layer`. A layer that takes them has no indexer.
    """

    whole_rows = True

    index_heads: int
    index_dim: int
    chosen: int
    index_interleaved: bool = later(False)
    index_loss: float = later(0.0)  # pyright: ignore[reportIncompatibleVariableOverride]
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
            name=f"{self.name}{INDEXER}{name}",
            shape=shape,
            decays=len(shape) > 1,
            initial=initial,
            linear=False,
            partial="by_position" if self.index_loss else "never",
            trained=self.index_loss > 0,
        )

    def words(self, arch: Architecture) -> tuple[str, ...]:
        learned = f", which learns with weight {self.index_loss:g}" if self.index_loss else ""
        source = "of an earlier block" if self.takes else f"by {self.index_heads} index heads{learned}"
        further = ("chosen for later blocks",) if self.gives else ()
        return (*super().words(arch), f"{self.chosen:,} positions chosen {source}", *further)

    def pair_flops(self, arch: Architecture) -> int:
        # Of both, forward and backward are counted as three forwards, and a choice has no backward. A loss takes scores
        # again, scores of attention too, and two further products for its gradients.
        scores, heads = 2 * self.index_heads * self.index_dim, 2 * arch.heads * arch.head_dim
        further = 0 if self.takes else scores + (3 * scores + heads if self.index_loss else 0)
        return super().pair_flops(arch) + further // 3

    def cached(self, arch: Architecture, tp: int, positions: int, plain: Set[str], exact: int = 1) -> int:
        keys = 0 if self.takes else self.index_dim * positions
        return super().cached(arch, tp, positions, plain, exact) + keys

    def _chosen(self, on: "Tracer", x: TracedTensor, narrow: TracedTensor) -> tuple[TracedTensor, ...]:
        local, ops = on.local, on.ops
        if local.sequence <= self.chosen and not self.index_loss:
            return ()
        seen = local.rows * local.sequence**2
        if self.takes:
            kinds = on.resolved.architecture.kinds
            takes = (len(each.layers) for each in kinds if any(it.takes == self.takes for it in each.block.layers()))
            return ops.take(self.takes, seen, blocks=sum(takes))
        first = len(ops.ops)
        with ops.scope():
            inputs = (ops.detached(x), ops.detached(narrow))
            indexed = self._indexed(on, *inputs)
            for op in ops.ops[first:]:
                op.saved, op.results = "", ()
                op.receivers = tuple(each for each in op.receivers if each not in inputs)
            scored = len(ops.ops)
            chosen = self._scored(on, *indexed)
            for op in ops.ops[scored:]:
                op.runs_back, op.receivers = False, ()
        for op in ops.ops[first:]:
            op.apart = True
        if self.gives:
            ops.give(self.gives, chosen)
        return chosen, *indexed

    def _attend(self, on: "Tracer", parts: tuple[TracedTensor, ...], chosen: tuple[TracedTensor, ...]) -> TracedTensor:
        if not chosen:
            return super()._attend(on, parts, chosen)
        mask, *indexed = chosen
        trained = any(INDEXER in name for name in on.shapes.keys() - on.frozen)
        learns = self.index_loss and indexed and trained
        return trace_selected(on, parts, mask, (lambda out: self._learned(on, out, indexed)) if learns else None)

    def _learned(self, on: "Tracer", out: TracedTensor, indexed: Sequence[TracedTensor]) -> TracedTensor:
        """Record the loss of the indexer, which keeps its gradients alone, and return `out` with the loss attached."""
        ops, local, heads, spread = on.ops, on.local, self.index_heads, on.axes.ulysses
        blocks = self._tiles(on)
        most = local.rows * max(queries * keys for queries, keys in blocks)
        pairs = local.rows * sum(queries * keys for queries, keys in blocks)
        calls: list[CollectiveCall] = []
        if spread > 1:
            calls.append(CollectiveCall("ulysses", "all_reduce", CP, local.rows * INDEX))
        for queries, keys in blocks:
            size = local.rows * queries * keys * local.exact
            if spread > 1:
                calls.append(CollectiveCall("ulysses", "reduce_scatter", CP, size * spread))
            if on.axes.tensor:
                calls.append(CollectiveCall("tp", "all_reduce", TP, size))
        gradients = [
            local.tokens * heads * self.index_dim,
            local.tokens * spread * self.index_dim,
            local.tokens * heads,
        ]
        attention = local.heads * most * local.exact
        loss = ops.op(
            *indexed,
            makes=local.exact,
            extra=[each * local.exact for each in gradients],
            scratch=(max(2 * attention, 3 * heads * most * local.exact) + 4 * most * local.exact, 0),
            saved=ATTENTION,
            flops=pairs * (2 * local.heads * local.head_dim + 6 * heads * self.index_dim),
            calls=calls,
            attends=True,
            apart=True,
        )
        view = TracedTensor(0, out.gradient, out)
        ops.ops.append(TracedOp(inputs=(out, loss), outputs=(view,), fresh=False))
        return view

    def _tiles(self, on: "Tracer") -> list[tuple[int, int]]:
        """Return the numbers of queries, and of the keys that they are multiplied with, of each tile."""
        length, spread = on.local.sequence, on.axes.ulysses
        own = length // spread
        firsts = range(0, own, TILE)
        return [(min(TILE, own - first), length if spread > 1 else min(first + TILE, own)) for first in firsts]

    def _indexed(self, on: "Tracer", x: TracedTensor, narrow: TracedTensor) -> tuple[TracedTensor, ...]:
        """Record queries, keys and weights of index heads."""
        ops, local, name = on.ops, on.local, f"{self.name}.indexer"
        each, heads = local.tokens * local.width, self.index_heads
        keys = on.linear(x, f"{name}.wk", local.between)
        norm = tuple(f"{name}.k_norm.{part}" for part in ("weight", "bias"))
        keys = ops.op(keys, makes=keys.size, extra=(2 * local.between * local.exact,), parameters=norm,
            weights=on.bytes_of(*norm), keeps=(keys,) if self.index_loss else ())  # fmt: skip
        weights = on.linear(x, f"{name}.weights_proj", local.between)
        joined = ops.op(keys, weights, makes=keys.size + weights.size)
        if on.axes.sequence:
            joined = on.column_parallel_input(joined, self.index_dim + heads)
        k, weights = ops.split(joined, each * self.index_dim, each * heads)
        k = ops.op(k, makes=each * self.index_dim)
        q = on.linear(narrow, f"{name}.wq_b", local.tokens)
        turned = each * heads * self.rope_dim
        q = ops.op(q, makes=q.size, scratch=(7 * turned // 2, 0))
        if on.axes.ulysses > 1:
            size = k.size * on.axes.ulysses
            back = CollectiveCall("ulysses", "reduce_scatter", CP, size)
            k = ops.op(k, makes=size, calls=(CollectiveCall("ulysses", "all_gather", CP, size),), back_calls=(back,))
        return q, k, weights

    def _scored(self, on: "Tracer", q: TracedTensor, k: TracedTensor, weights: TracedTensor) -> TracedTensor:
        """Record the scores of some queries at a time, and the choice of the highest."""
        ops, local, heads, spread = on.ops, on.local, self.index_heads, on.axes.ulysses
        blocks, length = self._tiles(on), local.sequence
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
