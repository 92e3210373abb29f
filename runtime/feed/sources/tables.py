"""Tables as units and records, for parquet, arrow and huggingface sources.

The process that calls `units` reads the tables and sends the needed columns along, in parts: no row group is read
twice, and memory stays bounded for row groups of every size. pyarrow is imported only where a table is read.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.records import BadRecord, Content, Reads, SourceRecord, SourceUnit, Unusable, decoded, parsed
from xtrain.runtime.feed.sources.fields import Take, find, settings_for, taker
from xtrain.runtime.feed.sources.files import matched, needs, size_of
from xtrain.runtime.feed.sources.source import OpenedSource, SourceRequest

if TYPE_CHECKING:
    import pyarrow as pa


UNIT_BYTES = 1 << 22
BATCH_ROWS = 1024


def check_columns(schema: "pa.Schema", reads: Reads, path: object) -> None:
    """Raise DataError if a table lacks a needed column, or has it in an unsupported type."""
    import pyarrow as pa

    for name in reads.fields:
        located = _located(schema, name)
        there = f"Its columns are {', '.join(f'`{field.name}`' for field in schema)}."
        if located is None:
            settings = settings_for(schema.names) if reads.form == "text" else ""
            there += f" Write `{settings}`." if settings else ""
            raise DataError(f"no column `{name}`", path=str(path), remedy=there)
        kind = located[1]
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        if name not in reads.typed or _is_json(kind):  # JSON may be any value: records are checked one by one
            continue
        wanted = {"chat": "a list of messages", "instruction": "text or a list of messages"}.get(reads.form, "text")
        talks = reads.form != "text" and _is_list(kind)
        talks = talks and (_is_json(kind.value_type) or pa.types.is_struct(kind.value_type))
        if not talks and not (reads.form != "chat" and _is_text(kind)):
            raise DataError(f"column `{name}` is {kind}, not {wanted}", path=str(path), remedy=there)


def columns_read(schema: "pa.Schema", reads: Reads) -> list[str]:
    """Return the columns, or struct fields, that hold the fields; a path of dots ends at a JSON column.

    Raises KeyError for a column that `check_columns` refuses.
    """
    located = {name: _located(schema, name) for name in reads.fields}
    if missing := [name for name, column in located.items() if column is None]:
        raise KeyError(missing[0])
    return list(dict.fromkeys(column[0] for column in located.values() if column is not None))


def top_columns(schema: "pa.Schema", reads: Reads) -> list[str]:
    """Return the top-level columns of the fields."""
    return list(dict.fromkeys(name if name in schema.names else name.split(".")[0] for name in reads.fields))


def packed(batch: "pa.RecordBatch", reads: Reads) -> Iterator[tuple[bytes, int]]:
    """Yield the needed columns in parts of a few MiB: the bytes of each and its number of rows.

    Raises pyarrow's ArrowInvalid if the batch is damaged.
    """
    import pyarrow as pa

    names = columns_read(batch.schema, reads)
    columns = [_column(batch, name) for name in names]
    for part in _parts(pa.record_batch(columns, names=names)):
        for column in part.columns:
            _check_intact(column)
        plain = pa.record_batch([_plain(column) for column in part.columns], names=names)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, plain.schema) as stream:
            stream.write_batch(plain)
        yield sink.getvalue().to_pybytes(), part.num_rows


def records_of(unit: SourceUnit, reads: Reads, place: object) -> Iterator[SourceRecord | BadRecord]:
    """Yield the records in a part from `packed`; `place` names the table, `unit.line` is the part's first row."""
    import pyarrow as pa

    if isinstance(unit.part, Unusable):
        yield BadRecord(origin=str(place), reason=unit.part.reason)
        return
    assert unit.line is not None
    with pa.ipc.open_stream(unit.part) as stream:
        batch = stream.read_next_batch()
    values = {name: _values(column) for name, column in zip(batch.schema.names, batch.columns, strict=True)}
    places = [
        (name, next(column_name for column_name in values if f"{name}.".startswith(f"{column_name}.")))
        for name in reads.fields
    ]
    take_content = taker(reads)
    for index in range(batch.num_rows):
        content = _taken({name: _inside(values[column][index], column, name) for name, column in places}, take_content)
        origin = f"{place}, row {unit.line + index}"
        if isinstance(content, Unusable):
            yield BadRecord(origin=origin, reason=content.reason)
        else:
            yield SourceRecord(content, origin)


def _inside(value: Any, column: str, name: str) -> Any:
    """Return the value of a field from the value of its column: the column itself, or a path inside its JSON."""
    if name == column or isinstance(value, Unusable):
        return value
    last = column.rsplit(".", maxsplit=1)[-1]
    return find({last: value}, last + name[len(column) :])


def _taken(values: Mapping[str, Any], take_content: Take) -> Content | Unusable:
    fields = {}
    for name, value in values.items():
        text = decoded(value) if isinstance(value, bytes) and value else value
        if isinstance(text, Unusable):
            return Unusable(f"field `{name}`: {text.reason}")
        fields[name] = "" if text == b"" else text
    return take_content(fields)


def _values(column: "pa.Array") -> list[Any]:
    """Return the values of a column as in records of JSON lines; Unusable for a damaged one."""
    convert = _conversion(column.type)
    try:
        values = column.to_pylist()
    except UnicodeDecodeError:
        values = [_value(scalar) for scalar in column]
    return values if convert is None else [_converted(value, convert) for value in values]


def _value(scalar: "pa.Scalar") -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return Unusable(f"invalid UTF-8 at byte {error.start} of a text in it")


def _converted(value: Any, convert: "Convert") -> Any:
    if value is None or isinstance(value, Unusable):
        return value
    try:
        return convert(value)
    except ValueError as error:
        return Unusable(f"invalid JSON in it: {error}")
    except RecursionError:
        return Unusable("invalid JSON in it: nested too deep")


Convert = Callable[[Any], Any]


def _conversion(kind: "pa.DataType") -> Convert | None:
    """Return a function to convert a value from `to_pylist` that is not null; None if no conversion is needed.

    JSON (the extension type `arrow.json`, which `datasets` uses for columns with mixed types) is parsed, maps become
    objects. A struct has every key that any row has: its nulls stand for keys that the row does not have, and are left
    out. Nulls of JSON and of maps are values.
    """
    import pyarrow as pa

    if _is_json(kind):
        return parsed
    if pa.types.is_dictionary(kind):
        return _conversion(kind.value_type)
    if pa.types.is_struct(kind):
        inner = {field.name: _conversion(field.type) for field in kind}
        return lambda value: {key: _through(inner[key], item) for key, item in value.items() if item is not None}
    if pa.types.is_map(kind):
        keys, items = _conversion(kind.key_type), _conversion(kind.item_type)
        return lambda value: {_through(keys, key): _through(items, item) for key, item in value}
    if _is_list(kind) and (convert_item := _conversion(kind.value_type)) is not None:
        return lambda value: [_through(convert_item, item) for item in value]
    return None


def _through(convert: Convert | None, value: Any) -> Any:
    return value if convert is None or value is None else convert(value)


def _located(schema: "pa.Schema", name: str) -> "tuple[str, pa.DataType] | None":
    """Return the column, or struct field, that has or contains a field, and its type; None if there is none."""
    import pyarrow as pa

    if name in schema.names:
        return name, schema.field(name).type
    came, *rest = name.split(".")
    kind = schema.field(came).type if came in schema.names else None
    for step in rest:
        if kind is not None and _is_json(kind):
            break
        if kind is None or not pa.types.is_struct(kind) or kind.get_field_index(step) < 0:
            return None
        came, kind = f"{came}.{step}", kind.field(kind.get_field_index(step)).type
    return None if kind is None else (came, kind)


def _column(batch: "pa.RecordBatch", name: str) -> "pa.Array":
    import pyarrow.compute

    if name in batch.schema.names:
        return batch.column(name)
    first, *rest = name.split(".")
    options = pyarrow.compute.StructFieldOptions(rest)
    # Unlike a child array it is null where its parent is null.
    return pyarrow.compute.call_function("struct_field", [batch.column(first)], options)


def _parts(batch: "pa.RecordBatch") -> "Iterator[pa.RecordBatch]":
    if batch.num_rows > 1 and (batch.nbytes > UNIT_BYTES or batch.num_rows > BATCH_ROWS):
        half = batch.num_rows // 2
        yield from _parts(batch.slice(0, half))
        yield from _parts(batch.slice(half))
    elif batch.num_rows:
        yield batch


def _plain(column: "pa.Array") -> "pa.Array":
    """Return text as bytes: UTF-8 is checked record by record."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if column.type in (pa.string_view(), pa.binary_view()):
        column = column.cast(pa.large_binary() if column.type == pa.binary_view() else pa.large_string())
    return column.cast(pa.large_binary()) if _is_text(column.type) else column


def _check_intact(column: "pa.Array") -> None:
    import pyarrow as pa

    try:
        # Offsets beyond the data would end the process, not raise.
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        if "UTF8" not in str(error):
            raise


def _is_text(kind: "pa.DataType") -> bool:
    import pyarrow as pa

    is_text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(test(kind) for test in is_text) or kind in (pa.string_view(), pa.binary_view())


def _is_json(kind: "pa.DataType") -> bool:
    return getattr(kind, "extension_name", None) == "arrow.json"


def _is_list(kind: "pa.DataType") -> bool:
    import pyarrow as pa

    return any(test(kind) for test in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))


EMPTY = Unusable("no documents: an empty file")
NO_ROWS = Unusable("no documents: a table without rows")
Batches = Callable[[Path, Reads], "Iterator[tuple[pa.RecordBatch, int]]"]
"""Yields the batches of a file with the columns that are read, each with the bytes of the file that it took."""


def open_tables(request: SourceRequest, batches: Batches) -> OpenedSource:
    """Open the files that match. batches: reads one; can be pickled. Raises DataError for a pattern without match."""
    files = matched(request.patterns, request.base)
    return OpenedSource(
        reader=TableFiles(kind=request.kind, batches=batches, files=files, reads=request.reads), files=files
    )


@frozen(kw_only=True)
class TableFiles:
    """Files of columns, with a record per row. Only the needed columns are loaded, and never a whole file at once."""

    kind: str
    """Kind of the source."""
    batches: Batches
    files: tuple[Path, ...]
    reads: Reads

    def units(self) -> Iterator[SourceUnit]:
        """Yield some rows at a time. Raises DataError for a file that is damaged or lacks a column."""
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
        """Yield a record, or a bad one, for each row."""
        return records_of(unit, self.reads, unit.path)

    def num_bytes(self) -> int:
        """Return the bytes of all files."""
        return sum(map(size_of, self.files))


def pyarrow(kind: str) -> Any:
    """Return the package. Raises DataError if it is not installed."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise needs("pyarrow", f"source `{kind}`") from error
    return pyarrow
