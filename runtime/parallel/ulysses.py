"""Ulysses (Jacobs et al. 2023, arXiv 2309.14509): a rank gives away positions of most heads for all positions of some.

Shapes: B rows, H heads, S positions of a row on this rank, U ranks, A head width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.runtime.parallel.collectives import exchange


def to_heads(tensors: Sequence[Tensor], group: ProcessGroup) -> list[Tensor]:
    """Each [B, H, S, A] → [B, H/U, U·S, A], all in one exchange; positions are in rank order.

    Where there are fewer heads than ranks, each is given to U/H neighbouring ranks.
    """
    ranks = group.size()
    spread = [_repeated(x_BHSA, ranks) for x_BHSA in tensors]
    # Rank u takes the u-th run of heads, of every tensor: queries meet the keys they are grouped with.
    pieces = torch.cat([x_BHSA.unflatten(1, (ranks, -1)) for x_BHSA in spread], dim=2).movedim(1, 0)
    ones = [1] * ranks
    received_UBHSA = exchange(pieces.contiguous(), group, ones, ones)
    joined_BHSA = received_UBHSA.permute(1, 2, 0, 3, 4).flatten(2, 3)
    return list(joined_BHSA.split([x.shape[1] // ranks for x in spread], dim=1))


def to_positions(x_BHSA: Tensor, group: ProcessGroup) -> Tensor:
    """[B, H/U, U·S, A] → [B, H, S, A]: the way back."""
    ranks = group.size()
    pieces_UBHSA = x_BHSA.unflatten(2, (ranks, -1)).movedim(2, 0)
    ones = [1] * ranks
    received_UBHSA = exchange(pieces_UBHSA.contiguous(), group, ones, ones)
    return received_UBHSA.movedim(0, 1).flatten(1, 2)


def _repeated(x_BHSA: Tensor, ranks: int) -> Tensor:
    heads = x_BHSA.shape[1]
    if heads % ranks == 0:
        return x_BHSA
    assert ranks % heads == 0, f"{heads} heads on {ranks} ranks: neither number divides the other"
    return x_BHSA.repeat_interleave(ranks // heads, dim=1)
