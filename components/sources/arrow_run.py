"""Reader of Arrow files, in file or stream format."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.records import Reads
from xtrain.runtime.feed.sources.files import size_of
from xtrain.runtime.feed.sources.source import OpenedSource, SourceRequest
from xtrain.runtime.feed.sources.tables import check_columns, open_tables

if TYPE_CHECKING:
    import pyarrow as pa

CONTINUES = b"\xff\xff\xff\xff"  # precedes every message of a stream since version 0.15 of the format


def open_source(request: SourceRequest) -> OpenedSource:
    """Return the files that match. Raises DataError for a pattern that matches none."""
    return open_tables(request, arrow_batches)


def arrow_batches(path: Path, reads: Reads) -> "Iterator[tuple[pa.RecordBatch, int]]":
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
        reported = 0
        for batch in stream:
            came = mapped.tell()
            yield batch, came - reported
            reported = came
        if not _says_that_it_ends(path):
            # The writer may have been stopped between two batches.
            raise pa.ArrowInvalid("the stream ends without an end marker")


def _says_that_it_ends(path: Path) -> bool:
    with path.open("rb") as file:
        end = CONTINUES + bytes(4) if file.read(4) == CONTINUES else bytes(4)
        file.seek(-len(end), os.SEEK_END)
        return file.read() == end
