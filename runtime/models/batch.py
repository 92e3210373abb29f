"""`ModelBatch`: a microbatch as the model takes it.

Shapes: B rows, S positions of a row that this rank holds, V vocabulary.
"""

from typing import Final

import torch
from attrs import define, field, frozen
from torch import Tensor

from xtrain.runtime.data.collate.batch import Microbatch
from xtrain.runtime.data.collate.samples import IGNORE_INDEX
from xtrain.runtime.data.collate.units import Units
from xtrain.runtime.models.cache import LayerCache
from xtrain.runtime.models.document_layout import DocumentLayout

# Among the columns of a term: what makes a sum over tokens a sum of the means of their sequences.
SHARE: Final = "share"


@frozen(kw_only=True, eq=False)
class RowLosses:
    """What the losses of different datasets are made of: sums over this rank's positions of each row.

    dataset_B: int64, number of the row's dataset. cross_entropy_B, valid_B: float64, over and of its valid tokens; with
    a head of rewards the losses of its sequences or pairs, and their number.
    """

    dataset_B: Tensor
    cross_entropy_B: Tensor
    valid_B: Tensor

    @classmethod
    def of(cls, dataset_B: Tensor, labels_BS: Tensor, each_T: Tensor) -> "RowLosses":
        """`each_T`: cross-entropies of all positions, rows one after the other, 0 where there is no label."""
        return cls(
            dataset_B=dataset_B,
            cross_entropy_B=each_T.view_as(labels_BS).sum(1, dtype=torch.float64),
            valid_B=(labels_BS != IGNORE_INDEX).sum(1, dtype=torch.float64),
        )


@define(kw_only=True, eq=False)
class ModelBatch:
    """Every stage of a pipeline has the whole of it but the tokens, which only the first and the last one need.

    cache: of texts that are generated, to which these positions are added; wanted are then the logits behind the last
    position of every row, and no losses.
    cross_entropy: sum over this batch's valid tokens, left here by the last stage; with a head of rewards what is
    minimised.
    dataset_B: number of each row's dataset, where several are trained on; datasets: the same without asking the device.
    row_losses: left by the last stage then.
    measures: in evaluation, what is minimised is asked for besides the cross-entropy.
    labels_BS: of a server's microbatch [B, S, K], K labels of each position, and so are its losses; its columns are
    [B, S · K].
    each: the cross-entropy of every token is asked for. losses_BS: left by the last stage then, 0 without a label.
    as_sampled: in a forward without gradients too, the cross-entropy is that of logits / temperature, where a run
    samples at another one than 1.
    recorded: [1 + metrics] what is minimised, where that is not the cross-entropy alone, and what is measured
    beside it; left by the last stage.
    text_BS, place_B, in_row_BS, columns, units: as of the microbatch.
    """

    input_ids_BS: Tensor | None
    labels_BS: Tensor | None
    positions_BS: Tensor
    real_BS: Tensor
    packing: DocumentLayout
    cache: LayerCache | None = None
    cross_entropy: Tensor | None = None
    recorded: Tensor | None = None
    dataset_B: Tensor | None = None
    datasets: tuple[int, ...] | None = None
    row_losses: RowLosses | None = None
    measures: bool = False
    each: bool = False
    losses_BS: Tensor | None = None
    as_sampled: bool = False
    text_BS: Tensor | None = None
    columns: dict[str, Tensor] = field(factory=dict)
    units: Units | None = None
    place_B: Tensor | None = None
    in_row_BS: Tensor | None = None

    @classmethod
    def of(cls, batch: Microbatch, device: torch.device) -> "ModelBatch":
        """Move a microbatch to `device`; its segments stay what they are: those of whole rows."""

        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=True)

        rows = batch.positions_BS.shape[0]
        return cls(
            input_ids_BS=moved(batch.input_ids_BS),
            labels_BS=moved(batch.labels_BS),
            positions_BS=batch.positions_BS.to(device, non_blocking=True),
            real_BS=batch.real_BS.to(device, non_blocking=True),
            packing=DocumentLayout.from_lengths(batch.cumulative_lengths, rows, batch.sequence, device),
            dataset_B=moved(batch.dataset_B),
            datasets=None if batch.dataset_B is None else tuple(batch.dataset_B.tolist()),
            text_BS=moved(batch.text_BS),
            columns={name: column.to(device, non_blocking=True) for name, column in batch.columns.items()},
            units=None if batch.units is None else batch.units.to(device),
            place_B=batch.place_B,  # moved where they are needed
            in_row_BS=batch.in_row_BS,
        )

    @property
    def sums(self) -> Tensor:
        """Cross-entropy, and behind it what is recorded besides: [1] or [2 + metrics]; of the last stage."""
        assert self.cross_entropy is not None
        first = self.cross_entropy[None]
        return first if self.recorded is None else torch.cat((first, self.recorded))

    def numbers(self, name: str) -> Tensor:
        """A column [T], or [T, width] of one with several numbers a token, all rows one after the other. `SHARE`: 1 /
        the labels of the sequence that a position is of."""
        if name != SHARE:
            return self.columns[name].flatten(0, 1)
        assert self.units is not None
        return self.units.share_BS.flatten()

    @property
    def shape(self) -> tuple[int, int]:
        rows, positions = self.positions_BS.shape
        return rows, positions
