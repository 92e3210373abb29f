"""Parquet and arrow: rows become records, only what is read is loaded, and damage is told with file and row."""

import pickle
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from xtrain.components.sources.arrow_run import arrow_batches
from xtrain.components.sources.parquet_run import parquet_batches
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.records import BadRecord, Reads, SourceRecord
from xtrain.runtime.feed.sources import tables as columns
from xtrain.runtime.feed.sources.tables import TableFiles

BATCHES = {"parquet": parquet_batches, "arrow": arrow_batches}
TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def write(table: pa.Table, path: Path, rows: int = 1000) -> Path:
    """Write a table in the format that the name says, some rows at a time."""
    match path.suffix:
        case ".parquet":
            pq.write_table(table, path, row_group_size=rows)
        case ".feather":
            pyarrow.feather.write_feather(table, path, chunksize=rows)
        case ".stream":
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as out:
                out.write_table(table, max_chunksize=rows)
        case _:
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as out:
                out.write_table(table, max_chunksize=rows)
    return path


FORMATS = ("x.parquet", "x.feather", "x.stream", "x.arrow")


def rows_of(*files: Path, **reads: Any) -> list[SourceRecord | BadRecord]:
    kind = "parquet" if files[0].suffix == ".parquet" else "arrow"
    reader = TableFiles(kind=kind, batches=BATCHES[kind], files=files, reads=Reads.of(reads))
    units = list(reader.units())
    return [row for unit in units for row in pickle.loads(pickle.dumps(reader)).read(pickle.loads(pickle.dumps(unit)))]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_every_row_is_read_once_in_order_whatever_its_group(name: str, rows: int, tmp_path: Path):
    texts = [f"text {index} é" for index in range(40)]
    path = write(pa.table({"id": range(40), "text": texts}), tmp_path / name, rows)
    assert rows_of(path) == [SourceRecord(text, f"{path}, row {row}") for row, text in enumerate(texts, start=1)]


@pytest.mark.parametrize("name", FORMATS)
def test_units_are_small_and_take_all_bytes_of_the_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(columns, "UNIT_BYTES", 10_000)
    texts = [f"{index} " * 200 for index in range(200)]
    path = write(pa.table({"text": texts}), tmp_path / name)
    kind = "parquet" if name == "x.parquet" else "arrow"
    reader = TableFiles(kind=kind, batches=BATCHES[kind], files=(path,), reads=Reads())
    units = list(reader.units())
    assert len(units) > 10
    assert all(len(unit.part) < 12_000 for unit in units)
    left = reader.num_bytes() - sum(unit.size for unit in units)
    assert left == (8 if name == "x.stream" else 0)  # the mark of the end of a stream
    assert [row.content for unit in units for row in reader.read(unit)] == texts  # type: ignore[union-attr]


@pytest.mark.parametrize("name", FORMATS)
def test_columns_may_be_inside_others(name: str, tmp_path: Path):
    meta = [{"text": "a", "id": 1}, None, {"text": None, "id": 2}, {"text": "b", "id": 3}]
    table = pa.table({"meta": meta, "meta.id": ["p", "q", "r", "s"]})
    path = write(table, tmp_path / name)
    null = "field `meta.text` is null, not a string"
    assert rows_of(path, text="meta.text") == [
        SourceRecord("a", f"{path}, row 1"),
        BadRecord(origin=f"{path}, row 2", reason=null),
        BadRecord(origin=f"{path}, row 3", reason=null),
        SourceRecord("b", f"{path}, row 4"),
    ]
    # A column that is called so comes before one inside another.
    assert [row.content for row in rows_of(path, text="meta.id")] == ["p", "q", "r", "s"]  # type: ignore[union-attr]


TEXT_TYPES = [
    pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.dictionary(pa.int32(), pa.string()),
    pa.string_view(), pa.binary_view(),
]  # fmt: skip


@pytest.mark.parametrize("kind", TEXT_TYPES, ids=str)
def test_text_of_any_type_is_text_if_it_is_utf8(kind: pa.DataType, tmp_path: Path):
    path = write(pa.table({"text": pa.array(["é", "", None, "b"], pa.string()).cast(kind)}), tmp_path / "x.arrow")
    assert rows_of(path) == [
        SourceRecord("é", f"{path}, row 1"),
        BadRecord(origin=f"{path}, row 2", reason="field `text` is empty"),
        BadRecord(origin=f"{path}, row 3", reason="field `text` is null, not a string"),
        SourceRecord("b", f"{path}, row 4"),
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_broken_utf8_is_a_bad_record_and_its_neighbours_are_not(name: str, tmp_path: Path):
    broken = pa.Array.from_buffers(pa.string(), 3, pa.array([b"a", b"b\xff", b"c"], pa.binary()).buffers())
    path = write(pa.table({"text": broken}), tmp_path / name)
    reason = "field `text`: invalid UTF-8 at byte 1"
    assert rows_of(path) == [
        SourceRecord("a", f"{path}, row 1"),
        BadRecord(origin=f"{path}, row 2", reason=reason),
        SourceRecord("c", f"{path}, row 3"),
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_conversations_and_pairs(name: str, tmp_path: Path):
    # In a table each message has every key that any has: nulls say nothing.
    talks = [TALK, [{**TALK[0], "name": "Ann"}, TALK[1]], [], None]
    path = write(
        pa.table({"messages": talks, "q": ["1?", "2?", "", "4?"], "a": ["1", "2", "3", None]}), tmp_path / name
    )
    chat = rows_of(path, form="chat")
    assert chat[:2] == [
        SourceRecord(TALK, f"{path}, row 1"),
        SourceRecord([{**TALK[0], "name": "Ann"}, TALK[1]], f"{path}, row 2"),
    ]
    assert [row.reason for row in chat[2:]] == [  # type: ignore[union-attr]
        "field `messages` has no messages",
        "field `messages` is null, not a list of messages",
    ]
    pairs = rows_of(path, form="instruction", prompt="q", response="a")
    assert pairs[0] == SourceRecord(
        [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "1"}], f"{path}, row 1"
    )
    assert [row.reason for row in pairs[2:]] == [  # type: ignore[union-attr]
        "field `q` is empty",
        "field `a` is null, not a string",
    ]


def test_only_the_columns_that_are_read_are_loaded(tmp_path: Path):
    path = write(pa.table({"text": ["a" * 50, "b" * 50], "other": ["x" * 100, "y" * 100]}), tmp_path / "x.parquet")
    data = bytearray(path.read_bytes())
    at = bytes(data).find(b"x" * 20)
    assert at > 0
    start = pq.ParquetFile(path).metadata.row_group(0).column(1)
    first = start.dictionary_page_offset or start.data_page_offset
    data[first : first + 10] = b"\xff" * 10  # the header of a page of the other column
    path.write_bytes(data)
    assert [row.content for row in rows_of(path)] == ["a" * 50, "b" * 50]  # type: ignore[union-attr]
    with pytest.raises(DataError, match=r"x\.parquet: damaged"):
        rows_of(path, text="other")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("reads", "message"), [
    ({"text": "txt"}, "no column `txt`\n.*Its columns are `id`, `text`, `tags`"),
    ({"text": "id"}, "column `id` is int64, not text"),
    ({"text": "text.x"}, "no column `text.x`"),
    ({"form": "chat", "messages": "text"}, "column `text` is string, not a list of messages"),
    ({"form": "chat", "messages": "tags"}, "column `tags` is list<.*string>, not a list of messages"),
])  # fmt: skip
def test_a_column_that_is_not_there_or_no_text(name: str, reads: dict, message: str, tmp_path: Path):
    path = write(pa.table({"id": [1], "text": ["a"], "tags": [["t"]]}), tmp_path / name)
    with pytest.raises(DataError, match=message) as caught:
        rows_of(path, **reads)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", FORMATS)
def test_files_without_rows_are_bad_records(name: str, tmp_path: Path):
    empty = tmp_path / f"a{Path(name).suffix}"
    empty.write_bytes(b"")
    rowless = write(pa.table({"text": pa.array([], pa.string())}), tmp_path / f"b{Path(name).suffix}")
    assert rows_of(empty, rowless) == [
        BadRecord(origin=str(empty), reason="no documents: an empty file"),
        BadRecord(origin=str(rowless), reason="no documents: a table without rows"),
    ]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("left", [0.0, 0.3, 0.6, 0.98])
def test_a_cut_off_table_is_an_error(name: str, left: float, tmp_path: Path):
    path = write(pa.table({"text": [f"{index} " * 100 for index in range(300)]}), tmp_path / name, 50)
    data = path.read_bytes()
    path.write_bytes(data[: 20 + int(left * (len(data) - 20))])
    with pytest.raises(DataError, match=rf"{name}: damaged"):
        rows_of(path)


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_that_is_no_table_is_an_error(name: str, tmp_path: Path):
    path = tmp_path / name
    path.write_bytes(b'{"text": "a"}\n' * 10)
    with pytest.raises(DataError, match=rf"{name}: damaged"):
        rows_of(path)


def test_one_kind_of_table_that_is_named_as_the_other(tmp_path: Path):
    path = write(pa.table({"text": ["a"]}), tmp_path / "x.parquet").rename(tmp_path / "x.arrow")
    with pytest.raises(DataError, match=r"it is a parquet file\n.*`parquet`"):
        rows_of(path)
    path.write_bytes(b"FEA1" + bytes(100))
    with pytest.raises(DataError, match="feather of version 1"):
        rows_of(path)


@pytest.mark.parametrize(("form", "offsets"), [("text", (0, 9, 18)), ("chat", (0, 2, 5))])
def test_offsets_that_point_beyond_the_data_are_found_before_they_are_followed(
    form: str, offsets: tuple[int, ...], tmp_path: Path
):
    table = pa.table({"text": ["some text", "more text"], "messages": [TALK, [*TALK, TALK[0]]]})
    path = write(table, tmp_path / "x.arrow")
    data = bytearray(path.read_bytes())
    at = data.find(b"".join(number.to_bytes(4, "little") for number in offsets))
    assert at > 0
    data[at + 4 : at + 8] = (1 << 20).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(DataError, match="damaged"):
        rows_of(path, form=form)


def test_the_error_of_a_damaged_table_says_how_far_it_could_be_read(tmp_path: Path):
    table = pa.table({"text": [f"{index} " * 100 for index in range(300)]})
    path = write(table, tmp_path / "x.stream", 50)
    path.write_bytes(path.read_bytes()[:-10_000])
    with pytest.raises(DataError, match=r"damaged after row 2[05]0: "):
        rows_of(path)


def test_a_stream_that_ends_between_two_batches_is_not_complete(tmp_path: Path):
    path = write(pa.table({"text": ["a", "b"]}), tmp_path / "x.stream")
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DataError, match="damaged after row 2: the stream ends without an end marker"):
        rows_of(path)


def test_without_pyarrow_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write(pa.table({"text": ["a"]}), tmp_path / "x.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"source `parquet` needs the package pyarrow\n.*pip install 'xtrain\[data\]'"):
        rows_of(path)
