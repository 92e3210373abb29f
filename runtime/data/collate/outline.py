"""Outlines: where segments and padding lie in the rows of a step, for pipeline stages that read no tokens.

One tensor whose shape never changes, so that a rank can receive it without knowing anything of the rows.
"""

# shapes: N microbatches, B rows, S positions of a whole row, T = B·S

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .batch import Microbatch, whole_positions


def encode_outline(microbatches: Sequence[Microbatch]) -> Tensor:
    """int32 [N, B, S]: position within its segment where a token is, the bitwise complement of it where padding is.

    The rows are whole even if the microbatches hold only a rank's part of their positions.
    """
    encoded = []
    for batch in microbatches:
        rows, sequence = batch.positions_BS.shape[0], batch.sequence
        positions_T, real_T = whole_positions(batch.cumulative_lengths, batch.real_lengths, rows * sequence)
        encoded.append(torch.where(real_T, positions_T, ~positions_T).to(torch.int32).view(rows, sequence))
    return torch.stack(encoded)


def decode_outline(outline_NBS: Tensor) -> list[Microbatch]:
    """Microbatches of whole rows without tokens, on the CPU."""
    return [_decode(outline_BS) for outline_BS in outline_NBS.cpu()]


def _decode(outline_BS: Tensor) -> Microbatch:
    real_BS = outline_BS >= 0
    positions_BS = torch.where(real_BS, outline_BS, ~outline_BS).to(torch.int64)
    starts = (positions_BS.flatten() == 0).nonzero().flatten()
    bounds = F.pad(starts, (0, 1), value=outline_BS.numel())
    real_before = F.pad(real_BS.flatten().cumsum(0), (1, 0))
    return Microbatch(
        input_ids_BS=None,
        labels_BS=None,
        positions_BS=positions_BS,
        real_BS=real_BS,
        cumulative_lengths=bounds.to(torch.int32),
        real_lengths=real_before[bounds].diff().to(torch.int32),
        num_valid=0,
    )
