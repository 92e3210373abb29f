"""RMSNorm of the residual stream, and the block that most families have: a norm before each of two layers."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from attrs import frozen

from xtrain.planner.architecture import Architecture, BlockParameter, Partial
from xtrain.planner.blocks.block import BlockPiece, Chain, Layer, Residual, composed, later
from xtrain.planner.costs.op_trace import TracedTensor

if TYPE_CHECKING:
    from xtrain.planner.costs.block_trace import Tracer


@frozen
class NormLayer(Layer):
    """RMSNorm over the width of the residual stream. plus_one: it multiplies by 1 + weight."""

    plus_one: bool = later(False)

    def parameters(self, arch: Architecture) -> Iterator[BlockParameter]:
        yield norm_weight(self.name, arch.dim, "by_position", plus_one=self.plus_one)

    def trace(self, on: "Tracer", x: TracedTensor) -> TracedTensor:
        return on.norm(x, self.name, on.local.between)


@composed
def pre_norm(attention: BlockPiece, feed_forward: BlockPiece) -> BlockPiece:
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""
    return Chain.of(
        Residual.of(NormLayer("input_layernorm"), attention),
        Residual.of(NormLayer("post_attention_layernorm"), feed_forward),
    )


@composed
def post_norm(attention: BlockPiece, feed_forward: BlockPiece) -> BlockPiece:
    """x + norm(attention(x)), then x + norm(feed_forward(x))."""
    return Chain.of(
        Residual.of(attention, NormLayer("post_attention_layernorm")),
        Residual.of(feed_forward, NormLayer("post_feedforward_layernorm")),
    )


@composed
def sandwich_norm(attention: BlockPiece, feed_forward: BlockPiece, plus_one: bool = False) -> BlockPiece:
    """x + norm(attention(norm(x))), then x + norm(feed_forward(norm(x))). plus_one: of all four norms."""
    before, after, before_next, after_next = (
        NormLayer(f"{name}_layernorm", plus_one=plus_one)
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")
    )
    return Chain.of(Residual.of(before, attention, after), Residual.of(before_next, feed_forward, after_next))


def norm_weight(
    name: str,
    width: int,
    partial: Partial = "never",
    cut: Literal["column"] | None = None,
    *,
    plus_one: bool = False,
) -> BlockParameter:
    """plus_one: what is multiplied by is 1 + weight, which is 1 at the beginning in either case."""
    initial = "zeros" if plus_one else "ones"
    return BlockParameter(
        name=f"{name}.weight", shape=(width,), decays=False, initial=initial, cut=cut, partial=partial
    )
