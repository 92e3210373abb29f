"""Reader of JSON lines, in blocks of complete lines with a record per line, or of one array of records."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xtrain.lazy_attrs import frozen
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.records import (
    BadRecord,
    Content,
    Reads,
    SourceRecord,
    SourceUnit,
    Unusable,
    decoded,
    described,
    parsed,
)
from xtrain.runtime.feed.sources.fields import Take, taker
from xtrain.runtime.feed.sources.files import array_units, blocks, matched, opened, size_of
from xtrain.runtime.feed.sources.source import OpenedSource, SourceRequest


def open_source(request: SourceRequest) -> OpenedSource:
    """Return the files that match. Raises DataError for a pattern that matches none."""
    files = matched(request.patterns, request.base)
    return OpenedSource(reader=JsonLinesFiles(files=files, reads=request.reads), files=files)


@frozen(kw_only=True)
class JsonLinesFiles:
    """JSON files: each line is one object, or the file is one array of objects. Blank lines are skipped; a file without
    records is a bad record."""

    files: tuple[Path, ...]
    reads: Reads

    def units(self) -> Iterator[SourceUnit]:
        """Yield blocks of complete lines, or elements of an array."""
        for path in self.files:
            is_array, data = opened(path, blocks(path))
            yield from array_units(path, data) if is_array else _lines(path, data)

    def read(self, unit: SourceUnit) -> Iterator[SourceRecord | BadRecord]:
        """Yield a good or bad record per line that is not blank."""
        if isinstance(unit.part, Unusable):
            yield BadRecord(origin=str(unit.path), reason=unit.part.reason)
            return
        assert unit.line is not None
        take = taker(self.reads)
        if isinstance(unit.part, list):
            for line, text in unit.part:
                content = _carefully(text, take)
                assert content is not None, "elements are not blank"
                yield _record(content, f"{unit.path}:{line}")
            return
        try:
            lines: list[Any] = unit.part.decode().split("\n")
        except UnicodeDecodeError:
            lines = unit.part.split(b"\n")
        for number, line in enumerate(lines, start=unit.line):
            if not line:
                continue
            try:
                fields = parsed(line)
                content = take(fields) if type(fields) is dict else _no_object(fields)
            except (ValueError, TypeError, RecursionError):
                content = _carefully(line, take)
            if content is None:
                continue
            yield _record(content, f"{unit.path}:{number}")

    def num_bytes(self) -> int:
        """Return the bytes of all files on disk."""
        return sum(map(size_of, self.files))


def _record(content: Content | Unusable, origin: str) -> SourceRecord | BadRecord:
    if isinstance(content, Unusable):
        return BadRecord(origin=origin, reason=content.reason)
    return SourceRecord(content, origin)


def _lines(path: Path, whole: Iterator[tuple[bytes, int]]) -> Iterator[SourceUnit]:
    line, size, anything = 1, 0, False
    pending: list[bytes] = []
    try:
        for data, taken in whole:
            size += taken
            cut = data.rfind(b"\n") + 1
            if not cut:
                pending.append(data)
                continue
            block, pending = b"".join([*pending, data[:cut]]), [data[cut:]]
            anything = anything or not block.isspace()
            yield SourceUnit(size=size, part=block, path=path, line=line)
            line, size = line + block.count(b"\n"), 0
    except DataError as error:
        # Blocks before the error were already passed on: this fails the whole source.
        raise DataError(error.message, path=path, line=line, remedy=error.remedy) from error
    block = b"".join(pending)
    if block and not block.isspace():
        yield SourceUnit(size=size, part=block, path=path, line=line)
    elif anything:
        if size:
            yield SourceUnit(size=size, part=b"", path=path, line=line)
    else:
        reason = "no documents: the file has blank lines only" if line > 1 or block else "no documents: an empty file"
        yield SourceUnit(size=size, part=Unusable(reason), path=path, line=1)


def _carefully(line: str | bytes, take: Take) -> Content | Unusable | None:
    """Return the content of a line that the fast path cannot parse; None for a blank line."""
    data = line.encode() if isinstance(line, str) else line
    if data.isspace():
        return None
    text = decoded(data)
    if isinstance(text, Unusable):
        return text
    try:
        fields = parsed(text)
    except json.JSONDecodeError as error:
        return Unusable(f"invalid JSON at character {error.pos + 1}: {error.msg}")
    except RecursionError:
        return Unusable("invalid JSON: nested too deep")
    except ValueError as error:
        return Unusable(f"invalid JSON: {error}")
    return take(fields) if isinstance(fields, dict) else _no_object(fields)


def _no_object(value: object) -> Unusable:
    return Unusable(f"it is {described(value)}, not a JSON object")
