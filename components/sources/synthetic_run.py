"""Indices of the synthetic documents; a tokenizer that generates them draws each one independently."""

from collections.abc import Iterator

import numpy as np

from xtrain.lazy_attrs import frozen
from xtrain.runtime.feed.documents import lengths
from xtrain.runtime.feed.records import BadRecord, SourceRecord, SourceUnit, SyntheticRecord
from xtrain.runtime.feed.sources.source import OpenedSource, SourceRequest

UNIT_TOKENS = 1 << 20


def open_source(request: SourceRequest) -> OpenedSource:
    """Open the source; there are no files."""
    return OpenedSource(reader=SyntheticDocuments(**request.options))


@frozen(kw_only=True)
class SyntheticDocuments:
    """Random documents of a small made-up language; each depends only on the seed and its number."""

    documents: int
    length: int
    """Mean number of tokens, bos and eos included."""
    spread: float
    """Standard deviation of the logarithm of the length."""
    seed: int

    def units(self) -> Iterator[SourceUnit]:
        """Yield ranges of documents."""
        at_once = max(1, UNIT_TOKENS // self.length)
        for start in range(0, self.documents, at_once):
            stop = min(start + at_once, self.documents)
            yield SourceUnit(size=(stop - start) * self.length, part=(start, stop))

    def read(self, unit: SourceUnit) -> Iterator[SourceRecord | BadRecord]:
        """Yield the seed, index and length from which each document of the range is drawn."""
        start, stop = unit.part
        indices = np.arange(start, stop, dtype=np.uint64)
        for index, tokens in enumerate(lengths(self.seed, indices, self.length, self.spread).tolist(), start=start):
            yield SourceRecord(
                SyntheticRecord(seed=self.seed, index=index, tokens=tokens), f"synthetic document {index}"
            )

    def num_bytes(self) -> int:
        """Return the expected number of tokens: there are no bytes to read."""
        return self.documents * self.length
