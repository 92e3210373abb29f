"""Recurrences over the ranks of a ring: states pass from rank to rank, and positions stay where they are.

What a piece of a document does to the state S before it is an affine map M S + s. Ranks gather the maps of all pieces
and compose those before their own (Blelloch 1990, as for LASP-2, arXiv 2502.07563); the backward does the same with
gradients. The gathered bytes do not depend on the length of rows. The convolution takes the last positions of the piece
before.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import torch
from attrs import define, frozen
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.blocks.recurrent import CHUNK
from xtrain.runtime.base.collectives import all_gather, gather

# shapes: B rows, S positions of a rank, L positions of all pieces in chunks, P pieces of a rank, W positions before a
# piece, A any width

Segments = tuple[tuple[int, int, int], ...]


class Moves(Protocol):
    """Product of maps and states, as `Recurrence` has it."""

    def moved(self, maps: Tensor, states: Tensor, *, back: bool = False) -> Tensor: ...


@frozen(eq=False)
class Pieces:
    """Pieces of documents of a rank in one row, each at the end of whole chunks.

    documents: number of documents, of each of which a rank has two pieces. begins: first chunk of each piece. places:
    position in the row of each position of the rank. before: the same of the W positions before each piece, and sources
    their places among the last positions of all pieces of all ranks; one more place is zero. last: the rank's positions
    that are the last of its pieces. piece_1L: number of the piece of each position. real_1L: True for positions of
    the rank.
    """

    documents: int
    begins: tuple[int, ...]
    places: Tensor
    before: Tensor
    sources: Tensor
    last: Tensor
    piece_1L: Tensor
    real_1L: Tensor

    def laid_out(self, inputs: Sequence[Tensor], halo: Sequence[Tensor]) -> list[Tensor]:
        """Return inputs [B, S, A] as [1, L, A], zero outside pieces. halo: positions before pieces [P · W, A] of the
        first inputs."""
        length = self.piece_1L.shape[1]
        flat = [each.flatten(0, 1) for each in inputs]
        found = [each.new_zeros(length, each.shape[1]).index_copy(0, self.places, each) for each in flat]
        found[: len(halo)] = (x.index_copy(0, self.before, own) for x, own in zip(found, halo, strict=False))
        return [each[None] for each in found]

    def only(self, x_RLA: Tensor) -> Tensor:
        """Return prepared inputs with zeros outside pieces."""
        return x_RLA * self.real_1L.view(1, -1, *(1,) * (x_RLA.dim() - 2))


@lru_cache(maxsize=8)  # all layers of a microbatch ask for the same
def pieces_of(segments: Segments, sequence: int, rank: int, ring: int, width: int, device: torch.device) -> Pieces:
    """Return the pieces of a rank of a ring: of each document one of 2 · ring from either side
    (`runtime/feed/collate.py`).

    sequence: positions of a row. width: positions before a piece that the convolution sees.
    """
    begins, places, before, sources, last, piece_L = [], [], [], [], [], []
    count, zero = 2 * len(segments), ring * 2 * len(segments) * width
    for document, (row, first, whole) in enumerate(segments):
        size = whole // (2 * ring)
        for side, number in enumerate((rank, 2 * ring - 1 - rank)):
            piece, own = 2 * document + side, row * (sequence // ring) + first // ring + side * size
            start = len(piece_L)
            piece_L += [piece] * (-(-(size + width) // CHUNK) * CHUNK)
            end = len(piece_L)
            begins.append(start // CHUNK)
            places += range(end - size, end)
            before += range(end - size - width, end - size)
            last += (own + max(0, size - width + at) for at in range(width))
            for back in range(width, 0, -1):
                other = number - 1 - (back - 1) // size
                holder, half = (other, 0) if other < ring else (2 * ring - 1 - other, 1)
                at = width - 1 - (back - 1) % size
                sources.append(((holder * count + 2 * document + half) * width + at) if other >= 0 else zero)

    def tensor(numbers: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(numbers, dtype=dtype, device=device)

    return Pieces(
        documents=len(segments),
        begins=tuple(begins),
        places=tensor(places),
        before=tensor(before),
        sources=tensor(sources),
        last=tensor(last),
        piece_1L=tensor(piece_L, torch.int32)[None],
        real_1L=torch.zeros(len(piece_L), dtype=torch.bool, device=device).index_fill_(0, tensor(places), True)[None],
    )


def halo_of(inputs: Sequence[Tensor], pieces: Pieces, group: ProcessGroup) -> list[Tensor]:
    """Return the positions [P · W, A] before each piece, gathered with gradients; zero before documents."""
    if not len(pieces.last):
        return []
    joined_SA = torch.cat([each.flatten(0, 1)[pieces.last] for each in inputs], dim=1)
    gathered_TA = gather(joined_SA, 0, group)
    with_zero_TA = torch.cat((gathered_TA, gathered_TA.new_zeros(1, gathered_TA.shape[1])))
    return list(with_zero_TA[pieces.sources].split([each.shape[-1] for each in inputs], dim=1))


@define(eq=False)
class RingScan:
    """`Scan` over the ranks of a ring. kept: maps M of own pieces and the states before them, of the forward."""

    how: Moves
    pieces: Pieces
    group: ProcessGroup
    kept: tuple[Tensor, ...] = ()

    @property
    def begins(self) -> Sequence[int]:
        return self.pieces.begins

    def states(self, maps: tuple[Tensor, Tensor]) -> Tensor:
        self.kept = (maps[0], self._composed(*maps))
        return self.kept[1]

    def gradients(self, grad_states: Tensor) -> tuple[Tensor, Tensor]:
        maps, states = self.kept
        return states, self._composed(maps, grad_states, back=True)

    def _composed(self, maps: Tensor, added: Tensor, *, back: bool = False) -> Tensor:
        """Return for each own piece what all maps before it give; back: gradients, by all after it."""
        ring, rank, documents = self.group.size(), self.group.rank(), self.pieces.documents
        flat = torch.cat((maps.flatten(1), added.flatten(1)), dim=1)
        gathered = all_gather(flat, 0, self.group).view(ring, documents, 2, -1)
        all_maps, all_added = gathered.split([maps[0].numel(), added[0].numel()], dim=-1)
        result = torch.zeros_like(added).unflatten(0, (documents, 2))
        state = result[:, 0]
        numbers = range(2 * ring)
        for number in reversed(numbers) if back else numbers:
            holder, half = (number, 0) if number < ring else (2 * ring - 1 - number, 1)
            if holder == rank:
                result[:, half] = state
            own_maps, own_added = (
                each[holder, :, half].unflatten(-1, like.shape[1:])
                for each, like in ((all_maps, maps), (all_added, added))
            )
            state = self.how.moved(own_maps, state, back=back) + own_added
        return result.flatten(0, 1)
