"""Text and JSON lines: everything that is there is read, and whatever is wrong is told with file and line."""

import gzip
import json
import os
import pickle
import random
import tracemalloc
from io import BytesIO
from pathlib import Path

import pytest
import zstandard
from examples import drawn
from hypothesis import given
from hypothesis import strategies as st

from xtrain.components.sources.jsonl_run import JsonLinesFiles
from xtrain.components.sources.text_run import TextFiles
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.records import BadRecord, Reads, SourceRecord
from xtrain.runtime.feed.sources import files as opening

PACKERS = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}


def lines_of(*files: Path, **reads: str) -> list[SourceRecord | BadRecord]:
    reader = JsonLinesFiles(files=files, reads=Reads.of(reads))
    units = list(reader.units())
    assert sum(unit.size for unit in units) == reader.num_bytes()
    return [record for unit in units for record in pickle.loads(pickle.dumps(reader)).read(unit)]


def jsonl(folder: Path, content: bytes, name: str = "x.jsonl") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def test_a_text_file_keeps_its_line_ends_and_loses_its_byte_order_mark(tmp_path: Path):
    path = tmp_path / "x.txt"
    path.write_bytes(b"\xef\xbb\xbfa\r\nb\n")
    reader = TextFiles(files=(path,))
    assert list(reader.read(next(reader.units()))) == [SourceRecord("a\r\nb\n", str(path))]


@pytest.mark.parametrize("suffix", PACKERS)
def test_small_text_files_are_read_together_and_large_ones_alone(suffix: str, tmp_path: Path):
    texts = [f"text {index} " * (200_000 if index == 3 else 1) for index in range(6)]
    paths = tuple(tmp_path / f"{index}.txt{suffix}" for index in range(6))
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(PACKERS[suffix](text.encode()))
    reader = TextFiles(files=paths)
    units = list(reader.units())
    assert len(units) == (1 if suffix else 3)
    assert sum(unit.size for unit in units) == reader.num_bytes()
    assert [record.content for unit in units for record in reader.read(unit)] == texts  # type: ignore[union-attr]


@pytest.mark.parametrize(("content", "reason"), [
    (b"", "empty text"),
    (b"\xff\xfea\x00", "invalid UTF-8 at byte 0"),
    (b"ab\xc3", "invalid UTF-8 at byte 2"),
    (b"ab\x00c", "a NUL at character 2: this is not a text file"),
])  # fmt: skip
def test_an_unusable_text_file_is_a_bad_record(content: bytes, reason: str, tmp_path: Path):
    path = tmp_path / "x.txt"
    path.write_bytes(content)
    reader = TextFiles(files=(path,))
    assert list(reader.read(next(reader.units()))) == [BadRecord(origin=str(path), reason=reason)]


BAD_LINES: list[tuple[bytes, str]] = [
    (b'{"text": "\xff"}', "invalid UTF-8 at byte 10"),
    (b'{"text": ', "invalid JSON at character 10: Expecting value"),
    (b'{"text": "a"} {"text": "b"}', "invalid JSON at character 15: Extra data"),
    (b'{"text": "a\x00"}', "invalid JSON at character 12: Invalid control character at"),
    (b'{"text": "a", "text": "b"}', "invalid JSON: key `text` appears twice"),
    (b'{"text": "a", "meta": {"x": 1, "x": 2}}', "invalid JSON: key `x` appears twice"),
    (b'{"text": "a", "score": NaN}', "invalid JSON: NaN is not a valid JSON number"),
    (b'{"text": "a", "score": -Infinity}', "invalid JSON: -Infinity is not a valid JSON number"),
    (b'{"body": "x"}', "no field `text`; there are `body`"),
    (b"{}", "no field `text`; there are none"),
    (b'{"text": 3}', "field `text` is a number, not a string"),
    (b'{"text": null}', "field `text` is null, not a string"),
    (b'{"text": ["a"]}', "field `text` is a list, not a string"),
    (b'{"text": ""}', "field `text` is empty"),
    (b'["text"]', "it is a list, not a JSON object"),
    (b'"text"', "it is a string, not a JSON object"),
    (b'{"text": "a\\ud800"}', "field `text` has an unpaired surrogate at character 1"),
    (b"[" * 100_000, "invalid JSON: nested too deep"),
    (b"\x1f\x8b", "invalid UTF-8 at byte 1"),
]


@pytest.mark.parametrize("neighbours", [b"first", "ünï".encode()])
@pytest.mark.parametrize(("line", "reason"), BAD_LINES)
def test_a_bad_line_is_reported_with_file_line_and_reason(line: bytes, reason: str, neighbours: bytes, tmp_path: Path):
    path = jsonl(tmp_path, b'{"text": "%b"}\n\n%b\n{"text": "last"}' % (neighbours, line))
    assert lines_of(path) == [
        SourceRecord(neighbours.decode(), f"{path}:1"),
        BadRecord(origin=f"{path}:3", reason=reason),
        SourceRecord("last", f"{path}:4"),
    ]


def test_line_ends_byte_order_mark_and_signs_that_only_look_like_line_ends(tmp_path: Path):
    text = "a\u2028\u2029\x85\u000bé"
    content = b"\xef\xbb\xbf" + json.dumps({"text": text}, ensure_ascii=False).encode() + b'\r\n \t\r\n{"text": "z"}\r'
    assert [record.content for record in lines_of(jsonl(tmp_path, content))] == [text, "z"]  # type: ignore[union-attr]


def test_a_field_may_be_inside_others_and_its_name_may_have_dots(tmp_path: Path):
    lines = [{"meta": {"text": "in"}}, {"meta.text": "as it stands", "meta": {"text": "in"}}, {"meta": "flat"}]
    lines += [{"meta": {"body": 1}}]
    path = jsonl(tmp_path, "\n".join(map(json.dumps, lines)).encode())
    found = lines_of(path, text="meta.text")
    assert [record.content for record in found if isinstance(record, SourceRecord)] == ["in", "as it stands"]
    assert [record.reason for record in found if isinstance(record, BadRecord)] == [
        "field `meta` is a string, not an object",
        "no field `meta.text`; there are `body`",
    ]


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "no documents: an empty file"), (b"\n \r\n\n", "no documents: the file has blank lines only")],
)
def test_a_file_without_records_is_a_bad_one(content: bytes, reason: str, suffix: str, tmp_path: Path):
    empty = jsonl(tmp_path, PACKERS[suffix](content), f"a.jsonl{suffix}")
    full = jsonl(tmp_path, b'{"text": "a"}', "b.jsonl")
    assert lines_of(empty, full) == [BadRecord(origin=str(empty), reason=reason), SourceRecord("a", f"{full}:1")]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_an_archive_may_have_several_members(suffix: str, tmp_path: Path):
    pack = PACKERS[suffix]
    content = pack(b'{"text": "a"}\n{"te') + pack(b"") + pack(b'xt": "b"}\n') + pack(b'{"text": "c"}')
    path = jsonl(tmp_path, content, f"x.jsonl{suffix}")
    assert lines_of(path) == [SourceRecord(text, f"{path}:{line}") for line, text in enumerate("abc", start=1)]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("lost", [1, 12, 300])
def test_a_cut_off_archive_is_an_error_that_says_how_far_it_went(suffix: str, lost: int, tmp_path: Path):
    rng = random.Random(0)
    content = b"".join(b'{"text": "%x"}\n' % rng.getrandbits(400) for _ in range(30_000))
    path = jsonl(tmp_path, PACKERS[suffix](content)[:-lost], f"x.jsonl{suffix}")
    with pytest.raises(DataError, match=rf"x\.jsonl{suffix}:\d+: cannot be read: .*end") as caught:
        list(JsonLinesFiles(files=(path,), reads=Reads()).units())
    # A block of zstd is 128 KiB, which are 1,200 lines. Where only the trailer is lost, all lines have been read.
    assert caught.value.line is not None and 28_500 < caught.value.line <= 30_001
    text = TextFiles(files=(path,))
    with pytest.raises(DataError, match="cannot be read"):
        list(text.read(next(text.units())))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_flipped_bit_in_an_archive_is_an_error(suffix: str, tmp_path: Path):
    packer = zstandard.ZstdCompressor(write_checksum=True).compress if suffix == ".zst" else gzip.compress
    data = bytearray(packer(os.urandom(5000).hex().encode()))
    data[len(data) // 2] ^= 1
    with pytest.raises(DataError, match="cannot be read"):
        lines_of(jsonl(tmp_path, bytes(data), f"x.jsonl{suffix}"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", gzip.compress(b"{}"), "it is packed with gzip\n.*\\.gz"),
        ("x.jsonl", zstandard.compress(b"{}"), "it is packed with zstd\n.*\\.zst"),
        ("x.jsonl", b"PAR1\x15\x04", "it is a parquet file\n.*`parquet`"),
        ("x.jsonl.gz", b'{"text": "a"}', "cannot be read: Not a gzipped file"),
        ("x.jsonl.zst", b'{"text": "a"}', "cannot be read: .*[Ff]rame"),
    ],
    # Named, since gzip writes the time into what it packs: processes would not collect the same tests.
    ids=["gzip", "zstd", "parquet", "text as gzip", "text as zstd"],
)
def test_a_file_that_is_not_what_its_name_says(name: str, content: bytes, message: str, tmp_path: Path):
    with pytest.raises(DataError, match=message):
        lines_of(jsonl(tmp_path, content, name))


def test_a_file_that_may_not_be_read_or_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = jsonl(tmp_path, b'{"text": "a"}')

    def refuse(self: Path, *args: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", refuse)
        with pytest.raises(DataError, match=r"x\.jsonl:1: cannot be read: Permission denied"):
            list(JsonLinesFiles(files=(path,), reads=Reads()).units())
    path.unlink()
    with pytest.raises(DataError, match=r"x\.jsonl: cannot be read: No such file"):
        JsonLinesFiles(files=(path,), reads=Reads()).num_bytes()


ONE_LINE = st.one_of(
    st.text(max_size=20).map(lambda text: json.dumps({"text": text}, ensure_ascii=False).encode()),
    st.sampled_from([b"", b" ", b"\r", b"nonsense", b'{"text": "\xff"}', b"[]"]),
    st.binary(max_size=9).map(lambda data: data.replace(b"\n", b"")),
)


@pytest.mark.parametrize("suffix", PACKERS)
@given(lines=st.lists(ONE_LINE, min_size=1, max_size=20), block=st.integers(1, 40), ended=st.booleans())
@drawn(30, 600)
def test_blocks_of_any_size_give_what_the_whole_file_gives(
    suffix: str, lines: list[bytes], block: int, ended: bool, tmp_path_factory: pytest.TempPathFactory
):
    content = b"\n".join(lines) + b"\n" * ended
    path = jsonl(tmp_path_factory.mktemp("lines"), PACKERS[suffix](content), f"x.jsonl{suffix}")
    with pytest.MonkeyPatch.context() as patch:
        # Arbitrary bytes may begin like an archive; that is told apart elsewhere.
        patch.setattr(opening, "beginnings", dict)
        whole = lines_of(path)
        patch.setattr(opening, "BLOCK", block)
        patch.setattr(opening, "ZSTD_BLOCK", max(1, block // 3))
        assert lines_of(path) == whole
    numbers = [int(record.origin.rpartition(":")[2]) for record in whole if record.origin != str(path)]
    assert numbers == [number for number, line in enumerate(lines, start=1) if line and not line.isspace()]


@pytest.mark.parametrize("suffix", ["", ".zst"])
@pytest.mark.parametrize("size", [16_000_000, pytest.param(100_000_000, marks=pytest.mark.slow)])
def test_a_line_of_many_blocks_is_read_in_a_few_times_its_size(suffix: str, size: int, tmp_path: Path):
    content = b'{"text": "a"}\n{"text": "%b"}\n{"text": "c"}' % (b"b" * size)
    path = jsonl(tmp_path, PACKERS[suffix](content), f"x.jsonl{suffix}")
    reader = JsonLinesFiles(files=(path,), reads=Reads())
    tracemalloc.start()
    lengths = [(len(record.content), record.origin) for unit in reader.units() for record in reader.read(unit)]  # type: ignore[union-attr,arg-type]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert lengths == [(1, f"{path}:1"), (size, f"{path}:2"), (1, f"{path}:3")]
    assert peak < 8 * size


def test_zstd_with_a_window_larger_than_usual_is_read(tmp_path: Path):
    parameters = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    packed = BytesIO()
    with zstandard.ZstdCompressor(compression_params=parameters).stream_writer(packed, closefd=False) as writer:
        writer.write(b'{"text": "a"}\n')
    assert [record.origin[-2:] for record in lines_of(jsonl(tmp_path, packed.getvalue(), "x.jsonl.zst"))] == [":1"]


def test_without_zstandard_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = jsonl(tmp_path, zstandard.compress(b"{}"), "x.jsonl.zst")
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(DataError, match=r"needs the package zstandard\n.*pip install 'xtrain\[data\]'"):
        lines_of(path)
