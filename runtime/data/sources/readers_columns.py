"""Readers of tables in files: parquet, and arrow as a file or a stream (feather is arrow). They need pyarrow."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from ..errors import DataError
from ..records.bad_records import BadRecord
from ..records.records import Reads, Record, SourceUnit, Unusable
from .columns import BATCH_ROWS, UNIT_BYTES, check_columns, packed, records_of
from .opening import needs, size_of

if TYPE_CHECKING:
    import pyarrow as pa

EMPTY = Unusable("no documents: an empty file")
CONTINUES = b"\xff\xff\xff\xff"  # before every message of a stream, since version 0.15 of the format
NO_ROWS = Unusable("no documents: a table without rows")


@frozen(kw_only=True)
class TableFiles:
    """Files of columns, a record a row. Only the columns that are read are loaded, and not all of a file at once."""

    kind: str
    """parquet or arrow."""
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
            batches = _parquet(path, self.reads) if self.kind == "parquet" else _arrow(path, self.reads)
            try:
                for batch, came in batches:
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

    def read(self, unit: SourceUnit) -> Iterator[Record | BadRecord]:
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


def _parquet(path: Path, reads: Reads) -> "Iterator[tuple[pa.RecordBatch, int]]":
    import pyarrow.parquet as pq

    total = size_of(path)
    # Without pre_buffer a row group is read page by page, not loaded whole.
    with pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
        check_columns(file.schema_arrow, reads, path)
        rows, done, told = file.metadata.num_rows, 0, 0
        for group in range(file.metadata.num_row_groups):
            at_once = _rows_at_once(file, group, reads)
            for batch in file.iter_batches(at_once, row_groups=[group], columns=list(reads.fields)):
                done += batch.num_rows
                came = total * done // rows
                yield batch, came - told
                told = came


def _rows_at_once(file: Any, group: int, reads: Reads) -> int:
    metadata = file.metadata.row_group(group)
    columns = (metadata.column(index) for index in range(metadata.num_columns))
    size = sum(
        column.total_uncompressed_size
        for column in columns
        if any(f"{column.path_in_schema}.".startswith(f"{name}.") for name in reads.fields)
    )
    return max(1, min(BATCH_ROWS, UNIT_BYTES * metadata.num_rows // max(size, 1)))


def _arrow(path: Path, reads: Reads) -> "Iterator[tuple[pa.RecordBatch, int]]":
    import pyarrow as pa

    total = size_of(path)
    with path.open("rb") as file:
        beginning = file.read(8)
    if beginning.startswith(b"FEA1"):
        raise DataError("feather of version 1", path=path, remedy="Write it as version 2, or as parquet.")
    if beginning.startswith(b"PAR1"):
        raise DataError("it is a parquet file", path=path, remedy="Use source `parquet`.")
    with pa.memory_map(str(path)) as mapped:
        if beginning.startswith(b"ARROW1"):
            file = pa.ipc.open_file(mapped)
            check_columns(file.schema, reads, path)
            count = file.num_record_batches
            for index in range(count):
                yield file.get_batch(index), total * (index + 1) // count - total * index // count
            return
        stream = pa.ipc.open_stream(mapped)
        check_columns(stream.schema, reads, path)
        told = 0
        for batch in stream:
            came = mapped.tell()
            yield batch, came - told
            told = came
        if not _says_that_it_ends(path):
            # Whoever wrote it may have been stopped between two batches.
            raise pa.ArrowInvalid("the stream ends without an end marker")


def _says_that_it_ends(path: Path) -> bool:
    with path.open("rb") as file:
        end = CONTINUES + bytes(4) if file.read(4) == CONTINUES else bytes(4)
        file.seek(-len(end), os.SEEK_END)
        return file.read() == end
