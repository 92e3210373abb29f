"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): modules behind the last block that predict
further tokens.

Module k takes what the head reads of the module before it, or of the model, at each position t, and the embedding of
token t + k; a block of its own and a norm make of both what the head predicts token t + k + 1 of. Embedding and head
are those of the model.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from attrs import frozen

from xtrain.planner.architecture import EMBEDDING, Architecture, BlockParameter
from xtrain.planner.blocks.block import BlockPiece, Chain, Layer, composed, later
from xtrain.planner.blocks.norm import NormLayer, norm_weight
from xtrain.planner.costs.op_trace import INDEX, TP, CollectiveCall, TracedTensor

if TYPE_CHECKING:
    from xtrain.planner.costs.block_trace import Tracer

JOIN: Final = "join"


@frozen
class JoinLayer(Layer):
    """[norm(embedding of token t + k); norm(x)] · Wᵀ, twice as wide as the residual stream, and back. plus_one: of both
    norms.

    Tensor parallel does not cut the matrix: each rank computes its own positions.
    """

    plus_one: bool = later(False)

    def parameters(self, arch: Architecture) -> Iterator[BlockParameter]:
        for norm in ("enorm", "hnorm"):
            yield norm_weight(f"{self.name}.{norm}", arch.dim, "by_position", plus_one=self.plus_one)
        yield BlockParameter(
            name=f"{self.name}.eh_proj.weight",
            shape=(arch.dim, 2 * arch.dim),
            decays=True,
            initial="normal",
            partial="by_position",
        )

    def trace(self, on: "Tracer", x: TracedTensor) -> TracedTensor:
        embedded, own = on.norm(self._embedded(on), f"{self.name}.enorm", on.local.between), x
        own = on.norm(own, f"{self.name}.hnorm", on.local.between)
        both = on.ops.op(embedded, own, makes=embedded.size + own.size)
        return on.linear(both, f"{self.name}.eh_proj", on.local.between)

    def _embedded(self, on: "Tracer") -> TracedTensor:
        """The gradient of the table is kept until that of the first embedding comes (`StageCosts`)."""
        local, tensor = on.local, on.axes.tensor
        trained = any(each.trained for each in on.run.inventory.tensors if each.name == f"{EMBEDDING}.weight")
        table = local.vocab * local.dim * local.width if trained else 0
        calls: tuple[CollectiveCall, ...] = ()
        back: tuple[CollectiveCall, ...] = ()
        if tensor:
            calls = (CollectiveCall("tp", "reduce_scatter" if on.axes.sequence else "all_reduce", TP, local.whole),)
            back = (CollectiveCall("tp", "all_gather", TP, local.whole),) if on.axes.sequence and table else ()
        return on.ops.op(
            makes=local.stream,
            extra=(local.tokens * (INDEX + 1),) if tensor and table else (),
            scratch=(0, table),
            calls=calls,
            back_calls=back,
        )


@composed
def further_block(last: BlockPiece, *, plus_one: bool = False) -> BlockPiece:
    """A module as a block: `last`, the block behind which it stands, between both ends. plus_one: of its norms."""
    return Chain.of(JoinLayer(JOIN, plus_one=plus_one), last, NormLayer("norm", plus_one=plus_one))
