"""Files of samples, each an object with fields, for sources that read a file from its beginning to its end."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from attrs import frozen

from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.records import BadRecord, Content, Reads, SourceRecord, SourceUnit, Unusable, decoded, parsed
from xtrain.runtime.feed.sources.fields import Take, taker
from xtrain.runtime.feed.sources.files import LONGEST, blocks, matched, size_of
from xtrain.runtime.feed.sources.source import OpenedSource, SourceRequest

UNIT: Final = 1 << 20  # bytes of samples that are read together, about
END: Final = 1024  # bytes at the end of a file that are kept


class StoredSample(NamedTuple):
    """name: of the sample in its file. fields: their values, None for those that are not read. length: bytes of the
    values. size: bytes of the file that were read for it."""

    name: str
    fields: dict[str, Any]
    length: int
    size: int


class Stream:
    """A file, unpacked if its name says that it is packed, which is read once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.end = b""  # last bytes of what was unpacked
        self._blocks, self._data, self._taken = blocks(path), memoryview(b""), 0

    def read(self, count: int) -> bytes:
        """Return the next bytes; fewer than asked for at the end of the file only. Raises DataError for one that cannot
        be unpacked."""
        parts: list[memoryview] = []
        while count > 0:
            if not self._data and not self._more():
                break
            parts.append(self._data[:count])
            self._data = self._data[count:]
            count -= len(parts[-1])
        return b"".join(parts)

    def exactly(self, count: int) -> bytes:
        """Return as many bytes. Raises DataError if there are fewer, or too many for a sample."""
        data = self.read(count) if count <= LONGEST else b""
        if len(data) < count:
            raise self.damaged(f"a part has {len(data):,} of {count:,} bytes")
        return data

    def skip(self) -> None:
        """Read to the end of the file."""
        while self._more():
            pass

    def taken(self) -> int:
        """Return the bytes of the file that were read since the last call."""
        count, self._taken = self._taken, 0
        return count

    def damaged(self, why: str) -> DataError:
        return DataError(f"damaged: {why}", path=self.path, remedy="Write or download this file again.")

    def _more(self) -> bool:
        for data, came in self._blocks:
            self._taken += came
            if data:
                self._data, self.end = memoryview(data), (self.end + data[-END:])[-END:]
                return True
        return False


Samples = Callable[[Path, Reads], Iterator[StoredSample]]
"""Yields the samples of a file. Raises DataError if it is damaged. Can be pickled."""


def open_samples(request: SourceRequest, samples: Samples) -> OpenedSource:
    """Open the files that match. Raises DataError for a pattern that matches none."""
    files = matched(request.patterns, request.base)
    return OpenedSource(reader=SampleFiles(samples=samples, files=files, reads=request.reads), files=files)


@frozen(kw_only=True)
class SampleFiles:
    """Files with samples; a file without any is a bad record."""

    samples: Samples
    files: tuple[Path, ...]
    reads: Reads

    def units(self) -> Iterator[SourceUnit]:
        """Yield some samples at a time, with the values of their fields."""
        for path in self.files:
            if not size_of(path):
                yield SourceUnit(size=0, part=Unusable("no documents: an empty file"), path=path)
                continue
            group, left, size, length = list[tuple[str, dict[str, Any]]](), size_of(path), 0, 0
            for sample in self.samples(path, self.reads):
                group.append((sample.name, sample.fields))
                size, length = size + sample.size, length + sample.length
                if length >= UNIT:
                    yield SourceUnit(size=size, part=group, path=path)
                    group, left, size, length = [], left - size, 0, 0
            none = not group and left == size_of(path)
            yield SourceUnit(size=left, part=Unusable("no documents: no sample") if none else group, path=path)

    def read(self, unit: SourceUnit) -> Iterator[SourceRecord | BadRecord]:
        """Yield a record, or a bad one, for each sample."""
        if isinstance(unit.part, Unusable):
            yield BadRecord(origin=str(unit.path), reason=unit.part.reason)
            return
        take = taker(self.reads)
        for name, fields in unit.part:
            content, origin = _taken(fields, take), f"{unit.path}, sample {name}"
            is_bad = isinstance(content, Unusable)
            yield BadRecord(origin=origin, reason=content.reason) if is_bad else SourceRecord(content, origin)

    def num_bytes(self) -> int:
        """Return the bytes of all files."""
        return sum(map(size_of, self.files))


def _taken(fields: dict[str, Any], take: Take) -> Content | Unusable:
    bad = (f"field `{name}`: {value.reason}" for name, value in fields.items() if isinstance(value, Unusable))
    reason = next(bad, None)
    return take(fields) if reason is None else Unusable(reason)


def json_in(data: bytes) -> Any:
    """Return the value of a text of JSON; Unusable if it is none."""
    text = decoded(data)
    if isinstance(text, Unusable):
        return text
    try:
        return parsed(text)
    except ValueError as error:
        return Unusable(f"invalid JSON: {error}")
    except RecursionError:
        return Unusable("invalid JSON: nested too deep")
