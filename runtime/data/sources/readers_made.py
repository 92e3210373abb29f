"""Readers of documents that no file holds: the user's own, and synthetic ones."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen

from ..documents.synthetic import lengths
from ..records.bad_records import BadRecord
from ..records.records import Reads, Record, SourceUnit, SyntheticDraw, Unusable
from ..records.texts import checked
from .fields import taker

UNIT_RECORDS = 256
UNIT_CHARACTERS = 1 << 20
UNIT_TOKENS = 1 << 20


@frozen(kw_only=True)
class UserRecords:
    """What the user's function yields: texts, or mappings of fields. It is only called where `units` is."""

    options: Mapping[str, Any]
    base: Path
    reads: Reads

    def units(self) -> Iterator[SourceUnit]:
        """Some records at a time. Raises DataError for whatever the user's code raises or may not yield."""
        from ..user_parts import user_source

        take = taker(self.reads)
        group: list[Any] = []
        number, size = 1, 0
        for item in user_source(self.options, self.base):
            # What is not read does not travel: it may be anything.
            group.append(take(item) if isinstance(item, Mapping) else self._text(item))
            size += _size(group[-1])
            if len(group) == UNIT_RECORDS or size >= UNIT_CHARACTERS:
                yield SourceUnit(size=size, part=group, line=number)
                group, number, size = [], number + len(group), 0
        if group:
            yield SourceUnit(size=size, part=group, line=number)

    def read(self, unit: SourceUnit) -> Iterator[Record | BadRecord]:
        """A record, or a bad one, for each that was yielded."""
        assert unit.line is not None
        for number, content in enumerate(unit.part, start=unit.line):
            origin = f"{self.options['module']}: {self.options['function']}, record {number}"
            if isinstance(content, Unusable):
                yield BadRecord(origin=origin, reason=content.reason)
            else:
                yield Record(content, origin)

    def num_bytes(self) -> None:
        """Nobody knows before the function ends."""
        return

    def _text(self, item: Any) -> str | Unusable:
        if self.reads.form != "text":
            return Unusable(f"a text, and it should have {' and '.join(f'`{name}`' for name in self.reads.fields)}")
        return checked(item, "the record")


@frozen(kw_only=True)
class SyntheticDocuments:
    """Documents drawn at random from a small made-up language; each depends on the seed and its number alone."""

    documents: int
    length: int
    """Mean number of tokens, bos and eos included."""
    spread: float
    """Standard deviation of the logarithm of the length."""
    seed: int

    def units(self) -> Iterator[SourceUnit]:
        """Ranges of documents."""
        at_once = max(1, UNIT_TOKENS // self.length)
        for start in range(0, self.documents, at_once):
            stop = min(start + at_once, self.documents)
            yield SourceUnit(size=(stop - start) * self.length, part=(start, stop))

    def read(self, unit: SourceUnit) -> Iterator[Record | BadRecord]:
        """What each document of the range is drawn from."""
        start, stop = unit.part
        indices = np.arange(start, stop, dtype=np.uint64)
        for index, tokens in enumerate(lengths(self.seed, indices, self.length, self.spread).tolist(), start=start):
            yield Record(SyntheticDraw(seed=self.seed, index=index, tokens=tokens), f"synthetic document {index}")

    def num_bytes(self) -> int:
        """Tokens, on average: there are no bytes to read."""
        return self.documents * self.length


def _size(content: Any) -> int:
    if isinstance(content, Unusable):
        return 1
    return len(content) if isinstance(content, str) else sum(len(message["content"]) for message in content)
