"""Reader of Parquet files, one row group at a time."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xtrain.runtime.feed.records import Reads
from xtrain.runtime.feed.sources.files import size_of
from xtrain.runtime.feed.sources.source import OpenedSource, SourceRequest
from xtrain.runtime.feed.sources.tables import BATCH_ROWS, UNIT_BYTES, check_columns, columns_read, open_tables

if TYPE_CHECKING:
    import pyarrow as pa


def open_source(request: SourceRequest) -> OpenedSource:
    """Return the files that match. Raises DataError for a pattern that matches none."""
    return open_tables(request, parquet_batches)


def parquet_batches(path: Path, reads: Reads) -> "Iterator[tuple[pa.RecordBatch, int]]":
    import pyarrow.parquet as pq

    total = size_of(path)
    # Without pre_buffer a row group is read page by page instead of being loaded whole.
    with pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
        check_columns(file.schema_arrow, reads, path)
        names = columns_read(file.schema_arrow, reads)
        rows, done, reported = file.metadata.num_rows, 0, 0
        for group in range(file.metadata.num_row_groups):
            at_once = _rows_at_once(file, group, names)
            for batch in file.iter_batches(at_once, row_groups=[group], columns=names):
                done += batch.num_rows
                came = total * done // rows
                yield batch, came - reported
                reported = came


def _rows_at_once(file: Any, group: int, names: list[str]) -> int:
    metadata = file.metadata.row_group(group)
    columns = (metadata.column(index) for index in range(metadata.num_columns))
    size = sum(
        column.total_uncompressed_size
        for column in columns
        if any(f"{column.path_in_schema}.".startswith(f"{name}.") for name in names)
    )
    return max(1, min(BATCH_ROWS, UNIT_BYTES * metadata.num_rows // max(size, 1)))
