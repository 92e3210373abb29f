"""Readers of text: whole files, and lines of JSON. Each cuts its files into units and makes records of a unit."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from attrs import frozen

from ..errors import DataError
from ..records.bad_records import BadRecord
from ..records.records import Message, Reads, Record, SourceUnit, Unusable
from ..records.texts import decoded, described
from .fields import Take, taker
from .opening import blocks, size_of

# Small files are read together: a unit each would cost more than reading them.
FILES_BYTES = 1 << 20


class SourceReader(Protocol):
    """How one kind of source is read. It can be pickled."""

    def units(self) -> Iterator[SourceUnit]:
        """What there is, in reading order, in parts of a few MiB at most unless one record is larger."""
        ...

    def read(self, unit: SourceUnit) -> Iterator[Record | BadRecord]:
        """The records of a unit, in their order, in whatever process."""
        ...

    def num_bytes(self) -> int | None:
        """What the sizes of all units add up to, if it can be known beforehand."""
        ...


@frozen(kw_only=True)
class TextFiles:
    """Each file is one document of UTF-8 text. Line ends are kept as they are, a byte order mark is not."""

    files: tuple[Path, ...]

    def units(self) -> Iterator[SourceUnit]:
        """Some files at a time."""
        group: list[Path] = []
        held = 0
        for path in self.files:
            size = size_of(path)
            if group and held + size > FILES_BYTES:
                yield SourceUnit(size=held, part=tuple(group), path=group[0])
                group, held = [], 0
            group.append(path)
            held += size
        if group:
            yield SourceUnit(size=held, part=tuple(group), path=group[0])

    def read(self, unit: SourceUnit) -> Iterator[Record | BadRecord]:
        """A record, or a bad one, for each file."""
        for path in unit.part:
            text = decoded(b"".join(data for data, _ in blocks(path)))
            if isinstance(text, str) and (nul := text.find("\0")) >= 0:
                text = Unusable(f"a NUL at character {nul}: this is not a text file")
            yield (
                Record(text, str(path)) if isinstance(text, str) else BadRecord(origin=str(path), reason=text.reason)
            )

    def num_bytes(self) -> int:
        """Bytes of all files, as they are on disk."""
        return sum(map(size_of, self.files))


@frozen(kw_only=True)
class JsonLinesFiles:
    """Each line is one JSON object. Blank lines are no records; a file without records is a bad one."""

    files: tuple[Path, ...]
    reads: Reads

    def units(self) -> Iterator[SourceUnit]:
        """Blocks of whole lines."""
        for path in self.files:
            yield from _lines(path)

    def read(self, unit: SourceUnit) -> Iterator[Record | BadRecord]:
        """A record, or a bad one, for each line that is not blank."""
        if isinstance(unit.part, Unusable):
            yield BadRecord(origin=str(unit.path), reason=unit.part.reason)
            return
        assert unit.line is not None
        take = taker(self.reads)
        try:
            lines: list[Any] = unit.part.decode().split("\n")
        except UnicodeDecodeError:
            lines = unit.part.split(b"\n")
        for number, line in enumerate(lines, start=unit.line):
            if not line:
                continue
            try:
                fields = _parse(line)
                content = take(fields) if type(fields) is dict else _no_object(fields)
            except (ValueError, TypeError, RecursionError):
                content = _carefully(line, take)
            if content is None:
                continue
            origin = f"{unit.path}:{number}"
            if isinstance(content, Unusable):
                yield BadRecord(origin=origin, reason=content.reason)
            else:
                yield Record(content, origin)

    def num_bytes(self) -> int:
        """Bytes of all files, as they are on disk."""
        return sum(map(size_of, self.files))


def _lines(path: Path) -> Iterator[SourceUnit]:
    line, size, anything = 1, 0, False
    held: list[bytes] = []
    try:
        for data, taken in blocks(path):
            size += taken
            cut = data.rfind(b"\n") + 1
            if not cut:
                held.append(data)
                continue
            block, held = b"".join([*held, data[:cut]]), [data[cut:]]
            anything = anything or not block.isspace()
            yield SourceUnit(size=size, part=block, path=path, line=line)
            line, size = line + block.count(b"\n"), 0
    except DataError as error:
        # Blocks before the break have gone out already: this fails the whole source, whatever became of them.
        raise DataError(error.message, path=path, line=line, remedy=error.remedy) from error
    block = b"".join(held)
    if block and not block.isspace():
        yield SourceUnit(size=size, part=block, path=path, line=line)
    elif anything:
        if size:
            yield SourceUnit(size=size, part=b"", path=path, line=line)
    else:
        reason = "no documents: the file has blank lines only" if line > 1 or block else "no documents: an empty file"
        yield SourceUnit(size=size, part=Unusable(reason), path=path, line=1)


def _carefully(line: str | bytes, take: Take) -> str | list[Message] | Unusable | None:
    """What a line holds that is not plainly an object: None for a blank one."""
    data = line.encode() if isinstance(line, str) else line
    if data.isspace():
        return None
    text = decoded(data)
    if isinstance(text, Unusable):
        return text
    try:
        fields = _parse(text)
    except json.JSONDecodeError as error:
        return Unusable(f"invalid JSON at character {error.pos + 1}: {error.msg}")
    except RecursionError:
        return Unusable("invalid JSON: nested too deep")
    except ValueError as error:
        return Unusable(f"invalid JSON: {error}")
    return take(fields) if isinstance(fields, dict) else _no_object(fields)


def _no_object(value: object) -> Unusable:
    return Unusable(f"the line is {described(value)}, not a JSON object")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key `{next(name for name in names if names.count(name) > 1)}` appears twice")
    return fields


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a valid JSON number")


_parse = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse).decode
