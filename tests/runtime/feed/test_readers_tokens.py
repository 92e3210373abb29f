"""Documents that are tokenised already: every format, cut behind separators or where the file says, nothing lost."""

import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples import drawn
from hypothesis import example, given
from hypothesis import strategies as st

from xtrain.components.sources import tokens_run
from xtrain.components.tokenizers.bytes_run import ByteTokenizer
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.documents import DocumentEncoder
from xtrain.runtime.feed.prepared import build_store
from xtrain.runtime.feed.records import BadRecord, SourceRecord, TokenIds
from xtrain.runtime.feed.sources.source import DataSource, open_source


def tokens(base: Path, *patterns: str, dtype: str | None = None, separator: int | None = 0, **more: Any) -> DataSource:
    options = {"dtype": dtype, "separator": separator}
    return open_source("tokens", patterns=patterns, options=options, base=base, **more)


def records_of(source: DataSource) -> list[SourceRecord | BadRecord]:
    copy = pickle.loads(pickle.dumps(source))
    units = list(source.units())
    assert sum(unit.size for unit in units) == source.num_bytes()
    return [record for unit in units for record in copy.read(pickle.loads(pickle.dumps(unit)))]


def ids_of(source: DataSource) -> list[list[int]]:
    found = []
    for record in records_of(source):
        assert isinstance(record, SourceRecord) and isinstance(record.content, TokenIds), record
        found.append(record.content.ids.tolist())
    return found


def raw(folder: Path, name: str, values: list[int], dtype: str = "uint16", head: bytes = b"") -> Path:
    path = folder / name
    path.write_bytes(head + np.array(values, dtype=dtype).tobytes())
    return path


def shard_head(magic: int, version: int, count: int) -> bytes:
    return struct.pack("<3i", magic, version, count) + bytes(1024 - 12)


def write_index(path: Path, lengths: list[int], documents: list[int], code: int = 8, item: int = 2) -> None:
    pointers = np.cumsum([0, *lengths[:-1]])[: len(lengths)] * item
    arrays = (np.array(lengths, "<i4"), np.array(pointers, "<i8"), np.array(documents, "<i8"))
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(documents))
    path.write_bytes(head + b"".join(array.tobytes() for array in arrays))


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
def test_arrays_of_every_dtype(dtype: str, tmp_path: Path):
    values = [5, 6, 0, 7, 0, 8, 9]
    np.save(tmp_path / "a.npy", np.array(values, dtype=dtype))
    raw(tmp_path, "b.bin", values, dtype)
    expected = [[5, 6, 0], [7, 0], [8, 9]]
    assert ids_of(tokens(tmp_path, "*.npy")) == expected
    assert ids_of(tokens(tmp_path, "*.bin", dtype=dtype)) == expected
    # The files are put one after the other, by name; none of them runs into the next.
    assert ids_of(tokens(tmp_path, "*.bin", "*.npy", dtype=dtype)) == expected * 2


def test_another_file_of_the_same_size_and_time_is_read_anew(tmp_path: Path):
    raw(tmp_path, "x.bin", [5, 6, 0])
    assert ids_of(tokens(tmp_path, "x.bin")) == [[5, 6, 0]]
    raw(tmp_path, "y", [7, 8, 0])
    time = (tmp_path / "x.bin").stat().st_mtime_ns
    os.utime(tmp_path / "y", ns=(time, time))
    (tmp_path / "y").replace(tmp_path / "x.bin")
    assert ids_of(tokens(tmp_path, "x.bin")) == [[7, 8, 0]]


def test_a_separator_with_nothing_before_it_belongs_to_no_document(tmp_path: Path):
    # Some write the separator in front of each document, some two between them.
    raw(tmp_path, "x.bin", [0, 5, 6, 0, 0, 7, 8])
    assert ids_of(tokens(tmp_path, "x.bin")) == [[5, 6, 0], [7, 8]]


def test_the_tokenizers_eos_ends_documents_unless_a_separator_is_set(tmp_path: Path):
    raw(tmp_path, "x.bin", [5, 257, 6, 1, 7, 257])
    assert ids_of(tokens(tmp_path, "x.bin", separator=None, tokenizer=ByteTokenizer())) == [[5, 257], [6, 1, 7, 257]]
    assert ids_of(tokens(tmp_path, "x.bin", separator=1, tokenizer=ByteTokenizer())) == [[5, 257, 6, 1], [7, 257]]
    with pytest.raises(DataError, match="needs a separator"):
        tokens(tmp_path, "x.bin", separator=None)


@given(
    values=st.lists(st.integers(0, 4), min_size=1, max_size=80), block=st.integers(1, 20), kind=st.sampled_from("ab")
)
@example(values=[0] * 8, block=1, kind="a")  # without `dtype` these could as well be four numbers of twice the width
@drawn(40, 800)
def test_blocks_of_any_size_give_the_same_documents(
    values: list[int], block: int, kind: str, tmp_path_factory: pytest.TempPathFactory
):
    folder = tmp_path_factory.mktemp("tokens")
    raw(folder, "x.bin", values)
    expected: list[list[int]] = [[]]
    for value in values:
        expected[-1].append(value)
        if value == 0:
            expected.append([])
    if kind == "b":
        lengths = [len(document) for document in expected]
        write_index(folder / "x.idx", lengths, list(range(len(lengths) + 1)))
    singles = [document for document in expected if len(document) == 1 and (kind == "b" or document != [0])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens_run, "UNIT_TOKENS", block)
        source = tokens(folder, "x.bin", dtype="uint16")
        found = records_of(source)
        assert all(unit.part[1] - unit.part[0] <= block + max(map(len, expected)) for unit in source.units())
    good = [record.content.ids.tolist() for record in found if isinstance(record, SourceRecord)]  # type: ignore[union-attr]
    bad = [record for record in found if isinstance(record, BadRecord)]
    assert good == [document for document in expected if len(document) > 1]
    assert [record.reason for record in bad] == ["a document of a single token has nothing to predict"] * len(singles)


@pytest.mark.parametrize(("magic", "version", "dtype"), [(20240520, 1, "uint16"), (20240801, 7, "uint32")])
def test_a_shard_with_a_header_is_read_behind_it(magic: int, version: int, dtype: str, tmp_path: Path):
    values = [0, 5, 6, 0, 7, 8]
    raw(tmp_path, "x.bin", values, dtype, shard_head(magic, version, len(values)))
    assert ids_of(tokens(tmp_path, "x.bin")) == [[5, 6, 0], [7, 8]]
    raw(tmp_path, "x.bin", values[:-1], dtype, shard_head(magic, version, len(values)))
    with pytest.raises(DataError, match=r"its header says 6 tokens, but it has 5"):
        ids_of(tokens(tmp_path, "x.bin"))


@pytest.mark.parametrize(("code", "dtype"), [(1, "uint8"), (4, "int32"), (5, "int64"), (8, "uint16")])
@pytest.mark.parametrize("pattern", ["x.bin", "x.idx", "x.*"])
def test_an_indexed_pair_says_itself_where_documents_begin(code: int, dtype: str, pattern: str, tmp_path: Path):
    raw(tmp_path, "x.bin", [5, 0, 6, 7, 0, 8, 9], dtype)
    # Sequences of 2, 1, 2 and 2 tokens; the second document has two of them, and separators mean nothing.
    write_index(tmp_path / "x.idx", [2, 1, 2, 2], [0, 1, 3, 4], code, np.dtype(dtype).itemsize)
    source = tokens(tmp_path, pattern)
    assert ids_of(source) == [[5, 0], [6, 7, 0], [8, 9]]
    assert {path.name for path in source.files} == {"x.bin", "x.idx"}


def test_an_index_that_does_not_fit_is_an_error(tmp_path: Path):
    raw(tmp_path, "x.bin", [5, 0, 6])
    for lengths, documents, code in (([2, 2], [0, 1, 2], 8), ([2, 1], [0, 1], 8), ([2, 1], [0, 2, 1, 2], 8)):
        write_index(tmp_path / "x.idx", lengths, documents, code)
        with pytest.raises(DataError, match=r"x\.bin: does not fit its index x\.idx"):
            ids_of(tokens(tmp_path, "x.bin"))
    write_index(tmp_path / "x.idx", [2, 1], [0, 1, 2], 6)
    with pytest.raises(DataError, match=r"x\.idx: version 1, dtype 6 of the index are not supported"):
        ids_of(tokens(tmp_path, "x.bin"))
    write_index(tmp_path / "x.idx", [2, 1], [0, 1, 2])
    whole = (tmp_path / "x.idx").read_bytes()
    for left in (0, 20, 40, len(whole) - 1):
        (tmp_path / "x.idx").write_bytes(whole[:left])
        with pytest.raises(DataError, match=r"x\.idx: (not an index of an indexed dataset|the index ends too early)"):
            ids_of(tokens(tmp_path, "x.bin"))


def test_a_store_of_ours_keeps_its_documents_and_what_is_trained(tmp_path: Path):
    lines = ['{"q": "1 + 1?", "a": "2"}', '{"q": "2 + 2?", "a": "4"}']
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    reads = {"form": "instruction", "prompt": "q", "response": "a", "template": "chatml"}
    conversations = open_source("jsonl", patterns=("x.jsonl",), reads=reads, base=tmp_path)
    encoder = DocumentEncoder(ByteTokenizer(), reads)
    store = build_store(conversations, encoder, tmp_path / "cache", jobs=1)
    assert store.trained is not None
    source = tokens(tmp_path, f"cache/{store.key}")
    found = DocumentEncoder(ByteTokenizer(), {"form": "text"}).encode(records_of(source))  # type: ignore[arg-type]
    for index, document in enumerate(found):
        assert np.array_equal(document.ids, store.document(index))  # type: ignore[union-attr]
        trained = store.trained[store.offsets[index] : store.offsets[index + 1]]
        assert np.array_equal(document.trained, trained)  # type: ignore[union-attr]
    again = build_store(source, DocumentEncoder(ByteTokenizer(), {"form": "text"}), tmp_path / "again", jobs=1)
    assert np.array_equal(again.tokens, store.tokens) and np.array_equal(again.trained, store.trained)
    (tmp_path / "cache" / store.key / "offsets.npy").write_bytes(b"")
    with pytest.raises(DataError, match="not an intact token store"):
        ids_of(source)


def test_ids_beyond_the_vocabulary_are_bad_records(tmp_path: Path):
    raw(tmp_path, "x.bin", [5, 6, 0, 5, 258, 0, 7, -1, 0, 8, 0], "int32")
    encoder = DocumentEncoder(ByteTokenizer(), {"form": "text"})
    found = encoder.encode(records_of(tokens(tmp_path, "x.bin", dtype="int32")))  # type: ignore[arg-type]
    assert [each.reason if isinstance(each, BadRecord) else each.ids.tolist() for each in found] == [
        [5, 6, 0],
        "its token 1 is 258, which is not in the vocabulary of 258",
        "its token 1 is -1, which is not in the vocabulary of 258",
        [8, 0],
    ]
    assert isinstance(found[1], BadRecord) and found[1].origin == f"{tmp_path / 'x.bin'}, token 3"


def test_files_without_tokens_are_bad_records(tmp_path: Path):
    (tmp_path / "a.bin").write_bytes(b"")
    np.save(tmp_path / "b.npy", np.array([], dtype=np.uint16))
    raw(tmp_path, "c.bin", [], head=shard_head(20240520, 1, 0))
    found = records_of(tokens(tmp_path, "*"))
    assert [(record.origin, record.reason) for record in found] == [  # type: ignore[union-attr]
        (str(tmp_path / name), "no documents: a file without tokens") for name in ("a.bin", "b.npy", "c.bin")
    ]


def save(array: np.ndarray) -> Any:
    return lambda path: np.save(path.with_suffix(".npy"), array, allow_pickle=True)


@pytest.mark.parametrize(("write", "dtype", "message"), [
    (save(np.zeros((2, 3), np.uint16)), None, "2 × 3 uint16, not a list of integers"),
    (save(np.zeros(3, np.float32)), None, "3 float32, not a list of integers"),
    (save(np.array(3)), None, "a single int64, not a list of integers"),
    (save(np.zeros(3, np.int32)), "uint16", "holds int32, and `dtype` says uint16"),
    (save(np.array([{"a": 1}])), None, "cannot be read: .*objects"),
    (lambda path: path.with_suffix(".npy").write_bytes(b"[1, 2, 3]"), None, "cannot be read: "),
    (lambda path: path.write_bytes(b"abc"), None, "3 bytes are not a whole number of uint16 values\n.*`dtype`"),
    (lambda path: path.write_bytes(b"abcdef"), "uint32", "6 bytes are not a whole number of uint32 values"),
])  # fmt: skip
def test_files_that_hold_something_else(write: Any, dtype: str | None, message: str, tmp_path: Path):
    write(tmp_path / "x.bin")
    with pytest.raises(DataError, match=message):
        ids_of(tokens(tmp_path, "x.*", dtype=dtype))


def test_a_cut_off_array_is_an_error(tmp_path: Path):
    np.save(tmp_path / "x.npy", np.arange(1000, dtype=np.uint16))
    data = (tmp_path / "x.npy").read_bytes()
    for left in (len(data) - 1, 500, 40, 5):
        (tmp_path / "x.npy").write_bytes(data[:left])
        with pytest.raises(DataError, match=r"x\.npy: cannot be read"):
            ids_of(tokens(tmp_path, "x.npy"))


def test_a_file_that_has_changed_is_read_anew(tmp_path: Path):
    raw(tmp_path, "x.bin", [5, 6, 0])
    assert ids_of(tokens(tmp_path, "x.bin")) == [[5, 6, 0]]
    raw(tmp_path, "x.bin", [7, 8, 9, 0])
    assert ids_of(tokens(tmp_path, "x.bin")) == [[7, 8, 9, 0]]


def test_wide_numbers_are_not_read_as_narrow_ones(tmp_path: Path):
    np.arange(1, 50, dtype=np.uint32).tofile(tmp_path / "wide.bin")
    options = {"dtype": None, "separator": 7}
    source = open_source("tokens", patterns=("wide.bin",), options=options, base=tmp_path)
    with pytest.raises(DataError, match="every second number is 0, read as uint16"):
        list(source.units())
    wide = open_source("tokens", patterns=("wide.bin",), options={**options, "dtype": "uint32"}, base=tmp_path)
    assert sum(len(record.content.ids) for unit in wide.units() for record in wide.read(unit)) == 49


def test_a_separator_outside_the_vocabulary_is_refused(tmp_path: Path):
    np.save(tmp_path / "a.npy", np.arange(20, dtype=np.uint16))
    with pytest.raises(DataError, match="separator 300 is not a token: the vocabulary has 258"):
        open_source(
            "tokens", patterns=("a.npy",), options={"dtype": None, "separator": 300}, base=tmp_path,
            tokenizer=ByteTokenizer(),
        )  # fmt: skip
