"""Columns of tables as units and records: what parquet, arrow and huggingface sources have in common.

The process that calls `units` reads the tables and sends the columns that are needed along, in parts: so no row group
is read twice, and memory stays bounded whatever the size of a row group.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..documents.chat_messages import conversation, pair
from ..errors import DataError
from ..records.bad_records import BadRecord
from ..records.records import Content, Reads, SourceRecord, SourceUnit, Unusable
from ..records.texts import checked, decoded
from ..records.usual_fields import settings_for
from .fields import Take, taker

if TYPE_CHECKING:
    import pyarrow as pa

UNIT_BYTES = 1 << 22
BATCH_ROWS = 1024


def check_columns(schema: "pa.Schema", reads: Reads, path: object) -> None:
    """Raise DataError if a table lacks a column that is read, or has it in a type that cannot be."""
    import pyarrow as pa

    for name in reads.fields:
        kind = _type_of(schema, name)
        there = f"Its columns are {', '.join(f'`{field.name}`' for field in schema)}."
        if kind is None:
            settings = settings_for(schema.names) if reads.form == "text" else ""
            there += f" Write `{settings}`." if settings else ""
            raise DataError(f"no column `{name}`", path=str(path), remedy=there)
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        if name not in reads.typed:
            continue
        if reads.form != "chat":
            if not _is_text(kind):
                raise DataError(f"column `{name}` is {kind}, not text", path=str(path), remedy=there)
        elif not _is_list(kind) or not pa.types.is_struct(kind.value_type):
            message = f"column `{name}` is {kind}, not a list of messages"
            raise DataError(message, path=str(path), remedy=there)


def top_columns(schema: "pa.Schema", reads: Reads) -> list[str]:
    """The columns that the fields are, or are parts of."""
    return list(dict.fromkeys(name if name in schema.names else name.split(".")[0] for name in reads.fields))


def packed(batch: "pa.RecordBatch", reads: Reads) -> Iterator[tuple[bytes, int]]:
    """The columns that are read, cut into parts of a few MiB: the bytes of each and its number of rows.

    Raises pyarrow's ArrowInvalid if the batch is damaged.
    """
    import pyarrow as pa

    columns = [_column(batch, name) for name in reads.fields]
    names = [str(index) for index in range(len(columns))]
    for part in _parts(pa.record_batch(columns, names=names)):
        for column in part.columns:
            _check_intact(column)
        plain = pa.record_batch([_plain(column) for column in part.columns], names=names)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, plain.schema) as stream:
            stream.write_batch(plain)
        yield sink.getvalue().to_pybytes(), part.num_rows


def records_of(unit: SourceUnit, reads: Reads, place: object) -> Iterator[SourceRecord | BadRecord]:
    """The records in a part that `packed` gave; `place` names the table, `unit.line` is the part's first row."""
    import pyarrow as pa

    if isinstance(unit.part, Unusable):
        yield BadRecord(origin=str(place), reason=unit.part.reason)
        return
    assert unit.line is not None
    with pa.ipc.open_stream(unit.part) as stream:
        batch = stream.read_next_batch()
    values = [_values(column) for column in batch.columns]
    take = None if reads.typed == reads.fields else taker(reads)
    for number, row in enumerate(zip(*values, strict=True), start=unit.line):
        content = _content(row, reads) if take is None else _taken(row, reads, take)
        origin = f"{place}, row {number}"
        if isinstance(content, Unusable):
            yield BadRecord(origin=origin, reason=content.reason)
        else:
            yield SourceRecord(content, origin)


def _content(row: Sequence[Any], reads: Reads) -> Content | Unusable:
    names = [f"column `{name}`" for name in reads.fields]
    if isinstance(row[0], Unusable):
        return Unusable(f"{names[0]}: {row[0].reason}")
    if reads.form == "chat":
        return conversation(row[0], names[0])
    texts: list[str] = []
    for value, name in zip(row, names, strict=True):
        text = decoded(value) if value else value
        if isinstance(text, Unusable):
            return Unusable(f"{name}: {text.reason}")
        text = checked("" if text == b"" else text, name)
        if isinstance(text, Unusable):
            return text
        texts.append(text)
    return texts[0] if reads.form == "text" else pair(*texts)


def _taken(row: Sequence[Any], reads: Reads, take: Take) -> Content | Unusable:
    """The content of a row of which columns are lists, numbers or truth values, too."""
    fields = {}
    for name, value in zip(reads.fields, row, strict=True):
        text = decoded(value) if isinstance(value, bytes) and value else value
        text = value if isinstance(value, Unusable) else text
        if isinstance(text, Unusable):
            return Unusable(f"column `{name}`: {text.reason}")
        fields[name] = "" if text == b"" else text
    return take(fields)


def _values(column: "pa.Array") -> list[Any]:
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return [_value(scalar) for scalar in column]


def _value(scalar: "pa.Scalar") -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return Unusable(f"invalid UTF-8 at byte {error.start} of a text in it")


def _type_of(schema: "pa.Schema", name: str) -> "pa.DataType | None":
    import pyarrow as pa

    if name in schema.names:
        return schema.field(name).type
    first, *rest = name.split(".")
    kind = schema.field(first).type if first in schema.names else None
    for step in rest:
        if kind is None or not pa.types.is_struct(kind) or kind.get_field_index(step) < 0:
            return None
        kind = kind.field(kind.get_field_index(step)).type
    return kind


def _column(batch: "pa.RecordBatch", name: str) -> "pa.Array":
    import pyarrow.compute

    if name in batch.schema.names:
        return batch.column(name)
    first, *rest = name.split(".")
    options = pyarrow.compute.StructFieldOptions(rest)
    # Unlike a child array it is null where what it is in is null.
    return pyarrow.compute.call_function("struct_field", [batch.column(first)], options)


def _parts(batch: "pa.RecordBatch") -> "Iterator[pa.RecordBatch]":
    if batch.num_rows > 1 and (batch.nbytes > UNIT_BYTES or batch.num_rows > BATCH_ROWS):
        half = batch.num_rows // 2
        yield from _parts(batch.slice(0, half))
        yield from _parts(batch.slice(half))
    elif batch.num_rows:
        yield batch


def _plain(column: "pa.Array") -> "pa.Array":
    """Text as bytes: whether they are UTF-8 is found out record by record."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if column.type in (pa.string_view(), pa.binary_view()):
        column = column.cast(pa.large_binary() if column.type == pa.binary_view() else pa.large_string())
    return column.cast(pa.large_binary()) if _is_text(column.type) else column


def _check_intact(column: "pa.Array") -> None:
    import pyarrow as pa

    try:
        # Offsets that point beyond the data would end a process, not raise.
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        if "UTF8" not in str(error):
            raise


def _is_text(kind: "pa.DataType") -> bool:
    import pyarrow as pa

    is_text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(test(kind) for test in is_text) or kind in (pa.string_view(), pa.binary_view())


def _is_list(kind: "pa.DataType") -> bool:
    import pyarrow as pa

    return any(test(kind) for test in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))
