"""RMSNorm of the residual stream, and the block that most families have: a norm before each of two layers."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from attrs import frozen

from ..architecture import Architecture, BlockParameter, Partial
from ..costs.op_trace import TracedTensor
from .block import BlockPiece, Chain, Layer, Residual, composed

if TYPE_CHECKING:
    from ..costs.block_trace import Tracer


@frozen
class NormLayer(Layer):
    """RMSNorm over the width of the residual stream."""

    def parameters(self, arch: Architecture) -> Iterator[BlockParameter]:
        yield norm_weight(self.name, arch.dim, "by_position")

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


def norm_weight(
    name: str, width: int, partial: Partial = "never", cut: Literal["column"] | None = None
) -> BlockParameter:
    return BlockParameter(name=f"{name}.weight", shape=(width,), decays=False, initial="ones", cut=cut, partial=partial)
