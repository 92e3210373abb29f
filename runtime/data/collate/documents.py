"""How long the documents of a step are: what attention costs depends on that, and padding is none of them."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from attrs import frozen

from xtrain.runtime.data.collate.batch import Microbatch


def _square(length: int) -> int:
    return length * length


@frozen
class DocumentSums:
    """Sums over segments of rows, each of which attends to itself alone.

    tokens: positions that hold tokens of documents. pairs: Σ s² over the s tokens of every segment. laid_pairs: Σ l²
    over the l positions of every segment as it lies there, padding and segments of nothing else included. Of attention
    with windows fewer pairs than that (`Work.pairs`).
    """

    tokens: int = 0
    pairs: int = 0
    laid_pairs: int = 0

    @classmethod
    def of(cls, microbatches: Sequence[Microbatch], pairs_of: Callable[[int], int] = _square) -> "DocumentSums":
        """Of whole rows, also where the microbatches hold only a rank's part of their positions. pairs_of: how many
        there are in a segment of so many positions."""
        tokens = pairs = laid_pairs = 0
        for batch in microbatches:
            real = batch.real_lengths.tolist()
            tokens += sum(real)
            pairs += sum(map(pairs_of, real))
            bounds = batch.cumulative_lengths.tolist()
            laid_pairs += sum(pairs_of(last - first) for first, last in pairwise(bounds))
        return cls(tokens, pairs, laid_pairs)
