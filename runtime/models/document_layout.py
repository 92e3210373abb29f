"""Where the documents of a microbatch lie, as attention wants to know it.

Shapes: B rows, S positions of a row.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor

from xtrain.runtime.models.cache import LayerCache


@frozen(eq=False)
class DocumentLayout:
    """Where the documents of a microbatch lie.

    segments: (row, first position, length) of every document, in order; together they cover every position.
    document_BS: int32, a number of its own for every document of the microbatch.
    single: every row is one document. block_masks: what flex wants to know, by window, made once for all layers.
    cached: keys and values of earlier positions lie in a cache (`cache.py`), and these rows are the newest positions.
    task_rows: how many of the rows go through the adapter of each task, one behind the other; empty: none does.
    """

    segments: tuple[tuple[int, int, int], ...]
    document_BS: Tensor
    single: bool
    block_masks: Mapping[int | None, Any] = field(factory=dict)
    cached: LayerCache | None = None
    task_rows: tuple[int, ...] = ()

    @classmethod
    def from_lengths(
        cls, cumulative_lengths: Tensor, rows: int, sequence: int, device: torch.device
    ) -> "DocumentLayout":
        """`cumulative_lengths` int32 [documents + 1] over the flattened B·S positions; no document crosses a row."""
        bounds = cumulative_lengths.tolist()
        segments = tuple((first // sequence, first % sequence, last - first) for first, last in pairwise(bounds))
        lengths = cumulative_lengths.diff().to(device, non_blocking=True)
        numbers = torch.arange(len(segments), device=device, dtype=torch.int32)
        document_T = numbers.repeat_interleave(lengths, output_size=rows * sequence)
        return cls(segments=segments, document_BS=document_T.view(rows, sequence), single=len(segments) == rows)

    @property
    def longest(self) -> int:
        """Positions of the longest document."""
        return max(length for _, _, length in self.segments)
