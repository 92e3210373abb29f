"""`ModelBatch`: a microbatch as the model takes it.

Shapes: B rows, S positions of a row that this rank holds, V vocabulary.
"""

import torch
from attrs import define
from torch import Tensor

from ..data.batch import Microbatch
from .attention import Packing


@define(kw_only=True, eq=False)
class ModelBatch:
    """Every stage of a pipeline has the whole of it but the tokens, which only the first and the last one need.

    last_BS: where the position is whose logits are wanted, instead of losses; all False on ranks that do not hold it.
    cross_entropy: sum over this batch's valid tokens, left here by the last stage.
    """

    input_ids_BS: Tensor | None
    labels_BS: Tensor | None
    positions_BS: Tensor
    real_BS: Tensor
    packing: Packing
    last_BS: Tensor | None = None
    cross_entropy: Tensor | None = None

    @classmethod
    def of(cls, batch: Microbatch, device: torch.device) -> "ModelBatch":
        """Move a microbatch to `device`; its segments stay what they are: those of whole rows."""
        rows = batch.positions_BS.shape[0]
        return cls(
            input_ids_BS=None if batch.input_ids_BS is None else batch.input_ids_BS.to(device),
            labels_BS=None if batch.labels_BS is None else batch.labels_BS.to(device),
            positions_BS=batch.positions_BS.to(device),
            real_BS=batch.real_BS.to(device),
            packing=Packing.from_lengths(batch.cumulative_lengths, rows, batch.sequence, device),
        )

    @property
    def shape(self) -> tuple[int, int]:
        rows, positions = self.positions_BS.shape
        return rows, positions
