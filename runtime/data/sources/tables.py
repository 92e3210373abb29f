"""Reader of tables in files, of whatever format. It needs pyarrow."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from xtrain.runtime.data.errors import DataError
from xtrain.runtime.data.records.bad_records import BadRecord
from xtrain.runtime.data.records.records import Reads, SourceRecord, SourceUnit, Unusable
from xtrain.runtime.data.sources.columns import packed, records_of
from xtrain.runtime.data.sources.files import matched
from xtrain.runtime.data.sources.opening import needs, size_of
from xtrain.runtime.data.sources.reader import OpenedSource, SourceRequest

if TYPE_CHECKING:
    import pyarrow as pa

EMPTY = Unusable("no documents: an empty file")
NO_ROWS = Unusable("no documents: a table without rows")
Batches = Callable[[Path, Reads], "Iterator[tuple[pa.RecordBatch, int]]"]
"""The batches of the file at a path with the columns that are read, each with the bytes of the file that it took."""


def open_tables(request: SourceRequest, batches: Batches) -> OpenedSource:
    """The files that match. batches: reads one; it can be pickled. Raises DataError for a pattern that matches none."""
    files = matched(request.patterns, request.base)
    return OpenedSource(
        reader=TableFiles(kind=request.kind, batches=batches, files=files, reads=request.reads), files=files
    )


@frozen(kw_only=True)
class TableFiles:
    """Files of columns, a record a row. Only the columns that are read are loaded, and not all of a file at once."""

    kind: str
    """The source that it is."""
    batches: Batches
    files: tuple[Path, ...]
    reads: Reads

    def units(self) -> Iterator[SourceUnit]:
        """Some rows at a time. Raises DataError for a file that is damaged or lacks a column."""
        pa = pyarrow(self.kind)
        for path in self.files:
            if not size_of(path):
                yield SourceUnit(size=0, part=EMPTY, path=path, line=1)
                continue
            row, size = 1, 0
            try:
                for batch, came in self.batches(path, self.reads):
                    size += came
                    for data, rows in packed(batch, self.reads):
                        yield SourceUnit(size=size, part=data, path=path, line=row)
                        row, size = row + rows, 0
            except (pa.ArrowException, OSError) as error:
                reached = f" after row {row - 1}" if row > 1 else ""
                message = f"damaged{reached}: {str(error).splitlines()[0]}"
                raise DataError(message, path=path, remedy="Write or download this file again.") from error
            if row == 1:
                yield SourceUnit(size=size_of(path), part=NO_ROWS, path=path, line=1)

    def read(self, unit: SourceUnit) -> Iterator[SourceRecord | BadRecord]:
        """A record, or a bad one, for each row."""
        return records_of(unit, self.reads, unit.path)

    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(map(size_of, self.files))


def pyarrow(kind: str) -> Any:
    """The package. Raises DataError if it is not installed."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise needs("pyarrow", f"source `{kind}`") from error
    return pyarrow
