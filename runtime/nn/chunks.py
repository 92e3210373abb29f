"""Chunks of positions of recurrent mixers: decays between positions, and products of many matrices.

shapes: R rows · heads, N chunks, C positions of a chunk, A any width; J further heads of a row, which may be absent
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from attrs import frozen
from torch import Tensor

from xtrain.blocks.recurrent import CHUNK


class Scan(Protocol):
    """Pieces of documents whose states other ranks continue. Each piece P begins with a chunk of one row of all pieces.

    A piece turns the state S before it into M S + s, a map of M and s.
    """

    @property
    def begins(self) -> Sequence[int]:
        """Number of the first chunk of each piece."""
        ...

    def states(self, maps: tuple[Tensor, Tensor]) -> Tensor:
        """Return the states before the pieces, from their maps M [P, …] and s [P, …]."""
        ...

    def gradients(self, grad_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states before the pieces, and the gradients of the states after them. grad_states: gradients of
        the former as if the latter had none."""
        ...


@frozen(eq=False)
class StateBefore:
    """`Scan` of one piece, which continues a known state."""

    state: Tensor
    begins: Sequence[int] = (0,)

    def states(self, maps: tuple[Tensor, Tensor]) -> Tensor:
        return self.state[None]

    def gradients(self, grad_states: Tensor) -> tuple[Tensor, Tensor]:
        return self.state[None], torch.zeros_like(grad_states)


def last_chunks(scan: Scan, count: int) -> list[int]:
    """Return the number of the last chunk of each piece. count: of all chunks."""
    return [*(first - 1 for first in scan.begins[1:]), count - 1]


class Decays(NamedTuple):
    """Decays of states in chunks.

    pairs: exp of the log decay from a position j to a later one i, 0 between documents. before: decay from the state
    before the chunk, 0 in documents that begin in it. after: decay to the state after the chunk, 0 in documents that
    end in it. kept: decay of the state over the whole chunk.
    """

    pairs_RNJCC: Tensor
    before_RNJC: Tensor
    after_RNJC: Tensor
    kept_RNJ: Tensor

    @classmethod
    def of(cls, logs_RNJC: Tensor, document_RNC: Tensor, *, begun: bool = False) -> "Decays":
        """Return the decays. logs: log decays of positions. document: number of the document of each position. begun:
        each chunk is of one document, which has a state before it."""
        first = torch.full_like(document_RNC[:, :1, 0], -1)  # nothing is before a row
        before = torch.cat((first, document_RNC[:, :-1, -1]), dim=1)  # of the chunk before
        last = document_RNC[:, :, 0] if begun else before
        document = document_RNC
        if logs_RNJC.dim() > document.dim():
            document, last = document[:, :, None], last[:, :, None]
        sums = logs_RNJC.cumsum(-1)
        together = (document[..., :, None] == document[..., None, :]).tril()
        pairs = (sums[..., :, None] - sums[..., None, :]).masked_fill_(~together, float("-inf")).exp_()
        before = sums.exp() * (document == last[..., None])
        after = (sums[..., -1:] - sums).exp() * (document == document[..., -1:])
        return cls(pairs, before, after, sums[..., -1].exp() * (document[..., -1] == last))


def from_end(x: Tensor, dim: int) -> Tensor:
    """Return sums of all from each index on."""
    return x.flip(dim).cumsum(dim).flip(dim)


def in_chunks(x_RTA: Tensor) -> Tensor:
    """Return [R, N, C, …], filled up with zeros, which change no state."""
    short = -x_RTA.shape[1] % CHUNK
    if short:
        x_RTA = torch.nn.functional.pad(x_RTA, (*(0, 0) * (x_RTA.dim() - 2), 0, short))
    return x_RTA.unflatten(1, (-1, CHUNK))


def documents_in_chunks(document_RT: Tensor) -> Tensor:
    """Return [R, N, C], filled up with the last document of each row."""
    short = -document_RT.shape[1] % CHUNK
    return torch.cat((document_RT, document_RT[:, -1:].expand(-1, short)), dim=1).unflatten(1, (-1, CHUNK))


def flat(x_RNAB: Tensor) -> Tensor:
    return x_RNAB.flatten(0, 1)


def matmul(left: Tensor, right: Tensor) -> Tensor:
    return torch.bmm(flat(left), flat(right)).unflatten(0, left.shape[:2])
