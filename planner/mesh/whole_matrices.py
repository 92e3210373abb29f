"""Which rank computes with each matrix as a whole, and which pieces travel there and back.

An optimizer whose update of an element depends on the whole matrix deals the matrices out to the ranks that share
them, in turns: a rank gets the pieces of its matrices from the others, computes, and sends each its piece of the
result. Every axis that cuts a matrix is one all-to-all there and one back; of a matrix that two axes cut, the pieces of
the inner cut are put together first. No matrix is whole on more than one rank of those that share it; ranks that hold
the same pieces (replicas) do the same.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import prod

from attrs import frozen

from xtrain.planner.mesh.sharding import piece

# A rank takes matrices of at least so many elements at a time, so that a call is worth its latency, and no more than
# that and one matrix, which are whole at once.
AT_ONCE = 2**23


@frozen
class MatrixCut:
    """An axis that cuts a matrix. dim: of the stack [count, rows, columns]. ranks: of the axis."""

    axis: str
    ranks: int
    dim: int

    def pieces(self, shape: Sequence[int]) -> list[tuple[int, ...]]:
        """The shapes of the pieces that its ranks have of what is whole along the dim."""
        return [
            tuple(piece(extent, self.ranks, rank) if dim == self.dim else extent for dim, extent in enumerate(shape))
            for rank in range(self.ranks)
        ]


@frozen
class MatrixStack:
    """Matrices of one parameter that one rank takes. first: in the stack that a rank holds of the parameter. shape:
    [count, rows, columns], of the whole matrices. cuts: from the outer to the inner. owner: along each cut."""

    name: str
    first: int
    shape: tuple[int, int, int]
    cuts: tuple[MatrixCut, ...]
    owner: tuple[int, ...]

    def at(self, cut: int, place: Sequence[int]) -> tuple[int, ...]:
        """The shape of what a rank has before the pieces of a cut are put together. place: of the rank, along each
        cut."""
        shape: tuple[int, ...] = self.shape
        for each, rank in zip(self.cuts[: cut + 1], place, strict=False):
            shape = each.pieces(shape)[rank]
        return shape


@frozen
class MatrixBatch:
    """Stacks with the same cuts that travel together."""

    cuts: tuple[MatrixCut, ...]
    stacks: tuple[MatrixStack, ...]

    def passing(self, cut: int, place: Sequence[int]) -> list[MatrixStack]:
        """Those that a rank has a piece of when those of a cut are put together: all of them at the innermost cut; then
        those whose owner is its neighbour along the cuts inside."""
        inner = range(cut + 1, len(self.cuts))
        return [stack for stack in self.stacks if all(stack.owner[each] == place[each] for each in inner)]

    def sent(self, place: Sequence[int]) -> Iterator[tuple[str, int]]:
        """(axis, elements) of every all-to-all of a rank, there and back: the larger of what goes in and comes out."""
        for cut, each in enumerate(self.cuts):
            if not (passing := self.passing(cut, place)):
                continue
            pieces = sum(prod(stack.at(cut, place)) for stack in passing)
            whole = sum(prod(stack.at(cut - 1, place)) for stack in passing if stack.owner[cut] == place[cut])
            yield from [(each.axis, max(pieces, whole))] * 2


def batches(stacks: Iterable[tuple[str, tuple[int, int, int], tuple[MatrixCut, ...]]]) -> list[MatrixBatch]:
    """Deal stacks of matrices out.

    stacks: name, whole shape and cuts of every parameter of a pipeline stage. Those of one shape follow one another,
    by name, so that every rank gets as much of each shape as the others.
    """
    by_cuts: dict[tuple[MatrixCut, ...], list[tuple[str, tuple[int, int, int]]]] = {}
    for name, shape, cuts in sorted(stacks, key=lambda each: (each[1], each[0])):
        by_cuts.setdefault(cuts, []).append((name, shape))
    return [batch for cuts, own in by_cuts.items() for batch in _dealt(cuts, own)]


def _dealt(cuts: tuple[MatrixCut, ...], own: list[tuple[str, tuple[int, int, int]]]) -> Iterator[MatrixBatch]:
    ranks = prod(cut.ranks for cut in cuts)
    turn, taken, open_ = 0, 0, []
    for name, (count, rows, columns) in own:
        first = 0
        while first < count:
            # A large stack is shared by all ranks; of a small one, each takes one matrix.
            more = min(count - first, max(1, count // ranks))
            owner, rest = [], turn % ranks
            for cut in reversed(cuts):
                rest, place = divmod(rest, cut.ranks)
                owner.insert(0, place)
            open_.append(MatrixStack(name, first, (more, rows, columns), cuts, tuple(owner)))
            first, turn, taken = first + more, turn + 1, taken + more * rows * columns
            if turn % ranks == 0 and taken >= ranks * AT_ONCE:
                yield MatrixBatch(cuts, tuple(open_))
                taken, open_ = 0, []
    if open_:
        yield MatrixBatch(cuts, tuple(open_))
