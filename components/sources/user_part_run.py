"""Reader of records yielded by a user function."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from xtrain.lazy_attrs import frozen
from xtrain.runtime.base.user_parts import part_of, user_source
from xtrain.runtime.feed.records import BadRecord, Reads, SourceRecord, SourceUnit, Unusable, checked, content_size
from xtrain.runtime.feed.sources.fields import taker
from xtrain.runtime.feed.sources.source import OpenedSource, SourceRequest

UNIT_RECORDS = 256
UNIT_CHARACTERS = 1 << 20


def open_source(request: SourceRequest) -> OpenedSource:
    """Open the source; the function is called only when records are read."""
    return OpenedSource(reader=UserRecords(options=request.options, base=request.base, reads=request.reads))


@frozen(kw_only=True)
class UserRecords:
    """Records yielded by the user's function: texts or mappings of fields. Only `units` calls the function."""

    options: Mapping[str, Any]
    base: Path
    reads: Reads

    def units(self) -> Iterator[SourceUnit]:
        """Yield groups of records. Raises DataError if the user's code raises or yields something invalid."""
        take = taker(self.reads)
        group: list[Any] = []
        number, size = 1, 0
        items = user_source(self.options, self.base)
        for item in items if self.reads.form != "tokens" else (each for batch in items for each in self._rows(batch)):
            # Unused fields are dropped here, because they may not be picklable.
            group.append(take(item) if isinstance(item, Mapping) else self._text(item))
            size += _size(group[-1])
            if len(group) == UNIT_RECORDS or size >= UNIT_CHARACTERS:
                yield SourceUnit(size=size, part=group, line=number)
                group, number, size = [], number + len(group), 0
        if group:
            yield SourceUnit(size=size, part=group, line=number)

    def read(self, unit: SourceUnit) -> Iterator[SourceRecord | BadRecord]:
        """Yield a good or bad record per item of the function."""
        assert unit.line is not None
        for number, content in enumerate(unit.part, start=unit.line):
            origin = f"{self.options['module']}: {self.options['function']}, record {number}"
            if isinstance(content, Unusable):
                yield BadRecord(origin=origin, reason=content.reason)
            else:
                yield SourceRecord(content, origin)

    def num_bytes(self) -> None:
        """Return None: the size is unknown before the function ends."""
        return

    def _rows(self, item: Any) -> Iterator[Any]:
        """Yield the rows of a batch of token ids, tensors or arrays [rows, length], as a DataLoader gives them, without
        the positions that `attention_mask` leaves out; yield any other item itself."""
        ids: Any = item.get(self.reads.tokens) if isinstance(item, Mapping) else None
        if getattr(ids, "ndim", None) != 2:
            yield item
            return
        shape = tuple(ids.shape)
        kept = item.get("attention_mask")
        if kept is not None and tuple(getattr(kept, "shape", ())) != shape:
            where = f"`attention_mask` has not the shape {list(shape)} of `{self.reads.tokens}`"
            raise part_of("source", self.options, self.base).failed(f"gave a batch whose {where}")
        for row in range(shape[0]):
            places = None if kept is None else np.flatnonzero(np.asarray(kept[row]))
            yield {name: _of_row(value, row, shape, places) for name, value in item.items()}

    def _text(self, item: Any) -> str | Unusable:
        if self.reads.form != "text":
            return Unusable(f"a text, and it should have {' and '.join(f'`{name}`' for name in self.reads.fields)}")
        return checked(item, "the record")


def _of_row(value: Any, row: int, shape: tuple[int, ...], places: np.ndarray | None) -> Any:
    """Return a row of a batch's value as plain numbers; a value that has no rows is returned unchanged."""
    own = tuple(value.shape) if hasattr(value, "shape") else (len(value),) if isinstance(value, list | tuple) else ()
    if own[:1] != shape[:1]:
        return value
    part = value[row]
    if places is not None and own[:2] == shape:
        return np.asarray(part)[places].tolist()
    return part.tolist() if hasattr(part, "tolist") else part


def _size(content: Any) -> int:
    return 1 if isinstance(content, Unusable) else content_size(content)
