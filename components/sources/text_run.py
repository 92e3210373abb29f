"""Reader of plain text: a file is a document."""

from collections.abc import Iterator
from pathlib import Path

from xtrain.lazy_attrs import frozen
from xtrain.runtime.feed.records import BadRecord, SourceRecord, SourceUnit, Unusable, decoded
from xtrain.runtime.feed.sources.files import blocks, matched, size_of
from xtrain.runtime.feed.sources.source import OpenedSource, SourceRequest

# Small files are read together: a unit per file would cost more than reading it.
FILES_BYTES = 1 << 20


def open_source(request: SourceRequest) -> OpenedSource:
    """Return the files that match. Raises DataError for a pattern that matches none."""
    files = matched(request.patterns, request.base)
    return OpenedSource(reader=TextFiles(files=files), files=files)


@frozen(kw_only=True)
class TextFiles:
    """Files of UTF-8 text, one document each. Line ends are kept, a byte order mark is removed."""

    files: tuple[Path, ...]

    def units(self) -> Iterator[SourceUnit]:
        """Yield groups of files."""
        group: list[Path] = []
        group_bytes = 0
        for path in self.files:
            size = size_of(path)
            if group and group_bytes + size > FILES_BYTES:
                yield SourceUnit(size=group_bytes, part=tuple(group), path=group[0])
                group, group_bytes = [], 0
            group.append(path)
            group_bytes += size
        if group:
            yield SourceUnit(size=group_bytes, part=tuple(group), path=group[0])

    def read(self, unit: SourceUnit) -> Iterator[SourceRecord | BadRecord]:
        """Yield a good or bad record per file."""
        for path in unit.part:
            text = decoded(b"".join(data for data, _ in blocks(path)))
            if isinstance(text, str) and (nul := text.find("\0")) >= 0:
                text = Unusable(f"a NUL at character {nul}: this is not a text file")
            yield (
                SourceRecord(text, str(path))
                if isinstance(text, str)
                else BadRecord(origin=str(path), reason=text.reason)
            )

    def num_bytes(self) -> int:
        """Return the bytes of all files on disk."""
        return sum(map(size_of, self.files))
