"""What a training or evaluation step is fed."""

# shapes: B rows of the microbatch, S positions of a row that this rank holds, T = B · whole positions of a row

import torch
from attrs import define, field
from torch import Tensor

from xtrain.runtime.data.collate.units import Units


@define(kw_only=True, eq=False)
class Microbatch:
    """Rows of packed segments. A segment is a run of positions that attend to each other and to nothing else.

    Under context parallel a rank holds some positions of every row: tensors [B, S] speak of these, all else of whole
    rows. The tokens are absent where the pipeline stages of a rank need none.
    """

    input_ids_BS: Tensor | None
    """int64."""
    labels_BS: Tensor | None
    """int64: the token to predict at each position, or IGNORE_INDEX."""
    positions_BS: Tensor
    """int64: position within the segment, from 0."""
    real_BS: Tensor
    """bool: True where a position holds a token of a document, False for padding of any kind."""
    cumulative_lengths: Tensor
    """int32 [segments + 1]: segment bounds over the T positions of whole rows, none across rows, padding included."""
    real_lengths: Tensor
    """int32 [segments]: how many positions of each segment hold tokens; they come first, padding after them."""
    dataset_B: Tensor | None = None
    """int64: number of each row's dataset among those that are trained on; None if there is one alone."""
    place_B: Tensor | None = None
    """int64: rows of the run before each one; None in evaluation."""
    in_row_BS: Tensor | None = None
    """int64: position in the row; None where a rank holds all of every row."""
    text_BS: Tensor | None = None
    """int64: number of the text that each position is of, where texts are scored one by one; padding is of any."""
    num_valid: int
    """Labels here that are not IGNORE_INDEX, counted where they were made so that no device has to be asked."""

    columns: dict[str, Tensor] = field(factory=dict)
    """float32 or float64 [B, S] each: a number for the label at each position, of those that the loss reads. Of those
    with several numbers a label [B, S, width], int32 or float32."""
    units: Units | None = None
    """The sequences or pairs of whole rows; None where no loss asks for them."""

    @property
    def num_units(self) -> int:
        """Sequences or pairs that a loss is taken of, in whole rows; 0 where no loss asks for them."""
        return 0 if self.units is None else self.units.count

    @property
    def sequence(self) -> int:
        """Positions of a whole row."""
        return self.cumulative_lengths.tolist()[-1] // self.positions_BS.shape[0]


def whole_positions(cumulative_lengths: Tensor, real_lengths: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """int64 [T] positions within segments, and bool [T] whether they hold tokens; T is `total`."""
    starts, lengths = cumulative_lengths[:-1].long(), cumulative_lengths.diff()
    positions_T = torch.arange(total) - starts.repeat_interleave(lengths, output_size=total)
    return positions_T, positions_T < real_lengths.repeat_interleave(lengths, output_size=total)
