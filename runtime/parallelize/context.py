"""`setup.parallel.cp`: attention over rows whose positions lie on several ranks."""

from attrs import frozen
from torch import Tensor

from xtrain.runtime.models.attention import AttentionKernel, AttentionModule
from xtrain.runtime.models.blockwise import blockwise_attention
from xtrain.runtime.models.document_layout import DocumentLayout
from xtrain.runtime.models.parts import ModelParts
from xtrain.runtime.ops import PlanMismatch, op
from xtrain.runtime.parallel.attention_blocks import PLAIN, Scores
from xtrain.runtime.parallel.axes import Axes
from xtrain.runtime.parallel.mesh import Meshes
from xtrain.runtime.parallel.ulysses import to_heads, to_positions
from xtrain.runtime.state import Rank


@frozen(eq=False)
class ContextKernel:
    """Attention of this rank's positions over all of their rows; `packing` speaks of whole rows.

    Ulysses brings together the positions of a ring rank for some of the heads. If that is not yet the whole row,
    ring attention does the rest, else the kernel of one rank.
    """

    inner: AttentionKernel
    axes: Axes

    def __call__(
        self,
        q_BHSA: Tensor,
        k_BKSA: Tensor,
        v_BKSA: Tensor,
        packing: DocumentLayout,
        scores: Scores = PLAIN,
        sink_H: Tensor | None = None,
    ) -> Tensor:
        ring, ulysses = self.axes.ring, self.axes.ulysses
        if ulysses is not None:
            q_BHSA, k_BKSA, v_BKSA = to_heads((q_BHSA, k_BKSA, v_BKSA), ulysses)
            sink_H = None if sink_H is None else sink_H.chunk(ulysses.size())[ulysses.rank()]
        if ring is not None:
            out_BHSA = blockwise_attention(q_BHSA, k_BKSA, v_BKSA, packing, scores, sink_H, ring)
        else:
            out_BHSA = self.inner(q_BHSA, k_BKSA, v_BKSA, packing, scores, sink_H)
        return out_BHSA if ulysses is None else to_positions(out_BHSA, ulysses)


@op("setup.parallel.cp")
def spread_attention(
    model: ModelParts, rank: Rank, meshes: Meshes, ring: int, ulysses: int, matches: list[int]
) -> None:
    """Every attention layer works on this rank's positions. Raises PlanMismatch unless there are as many as planned."""
    axes = model.axes
    axes.ring = meshes.group("ring") if ring > 1 else None
    axes.ulysses = meshes.group("ulysses") if ulysses > 1 else None
    axes.row = meshes.group("row")
    layers = [module for module in model.modules() if isinstance(module, AttentionModule)]
    planned = matches[rank.coordinates["pp"]]
    if len(layers) != planned:
        raise PlanMismatch(
            f"context parallel: {planned} attention layers are planned here, and {len(layers)} are built"
        )
    for layer in layers:
        layer.kernel = ContextKernel(layer.kernel, axes)
