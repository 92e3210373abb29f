"""Outlines: where segments and padding lie in the rows of a step, and numbers of rows, for pipeline stages that read
no tokens.

One tensor whose shape never changes, so that a rank can receive it without knowing anything of the rows.
"""

# shapes: N microbatches, B rows, S positions of a whole row, T = B·S

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from attrs import evolve
from torch import Tensor

from xtrain.runtime.data.collate.batch import Microbatch, whole_positions
from xtrain.runtime.data.packing.row_reader import UNKNOWN


def encode_outline(microbatches: Sequence[Microbatch], numbers: Sequence[str] = ()) -> Tensor:
    """int32 [N, B, S]: position within its segment where a token is, the bitwise complement of it where padding is.

    The rows are whole even if the microbatches hold only a rank's part of their positions. numbers: `place` or
    `dataset`, each of which is two more int32 behind the positions of every row.
    """
    encoded = []
    for batch in microbatches:
        rows, sequence = batch.positions_BS.shape[0], batch.sequence
        positions_T, real_T = whole_positions(batch.cumulative_lengths, batch.real_lengths, rows * sequence)
        outline_BS = torch.where(real_T, positions_T, ~positions_T).to(torch.int32).view(rows, sequence)
        known = (getattr(batch, f"{name}_B") for name in numbers)
        beside = [torch.full((rows,), UNKNOWN) if each_B is None else each_B for each_B in known]
        encoded.append(torch.cat([outline_BS, *(each_B.view(torch.int32).view(rows, 2) for each_B in beside)], dim=1))
    return torch.stack(encoded)


def decode_outline(outline_NBS: Tensor, numbers: Sequence[str] = ()) -> list[Microbatch]:
    """Microbatches of whole rows without tokens, on the CPU. numbers: as they were encoded."""
    return [_decode(outline_BS, numbers) for outline_BS in outline_NBS.cpu()]


def _decode(outline_BS: Tensor, numbers: Sequence[str]) -> Microbatch:
    outline_BS, *beside = outline_BS.split([outline_BS.shape[1] - 2 * len(numbers), *(2 for _ in numbers)], dim=1)
    found = {name: each.contiguous().view(torch.int64).view(-1) for name, each in zip(numbers, beside, strict=True)}
    known = {f"{name}_B": each_B for name, each_B in found.items() if not (each_B == UNKNOWN).all()}
    real_BS = outline_BS >= 0
    positions_BS = torch.where(real_BS, outline_BS, ~outline_BS).to(torch.int64)
    starts = (positions_BS.flatten() == 0).nonzero().flatten()
    bounds = F.pad(starts, (0, 1), value=outline_BS.numel())
    real_before = F.pad(real_BS.flatten().cumsum(0), (1, 0))
    whole = Microbatch(
        input_ids_BS=None,
        labels_BS=None,
        positions_BS=positions_BS,
        real_BS=real_BS,
        cumulative_lengths=bounds.to(torch.int32),
        real_lengths=real_before[bounds].diff().to(torch.int32),
        num_valid=0,
    )
    return evolve(whole, **known)
