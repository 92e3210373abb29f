"""Sources: which files, in which order, and what becomes of records that cannot be read."""

import gzip
import json
from pathlib import Path

import pytest

from xtrain.runtime.data.bad_records import KEPT, BadRecordLog
from xtrain.runtime.data.errors import DataError
from xtrain.runtime.data.sources import Source, open_source


def read(source: Source, limit: int | None = None) -> tuple[list[str], BadRecordLog]:
    log = BadRecordLog(limit=source.bad_record_limit if limit is None else limit)
    return [document.text for document in source.documents(log)], log


def test_the_standard_library_is_read_in_order_of_name():
    source = open_source("python_stdlib", base=Path("/nowhere"))
    log = BadRecordLog(limit=source.bad_record_limit)
    origins = [document.origin for document in source.documents(log)]
    assert origins == sorted(origins)
    assert {"argparse.py", "os.py"} <= {Path(origin).name for origin in origins}
    assert all(Path(origin).parent == source.base for origin in origins)


def test_text_files_are_found_recursively_sorted_and_once(tmp_path: Path):
    for name in ("b.txt", "deep/er/a.txt", "a.txt", "a.md"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    source = open_source("text", patterns=("**/*.txt", "b.*"), base=tmp_path)
    assert read(source)[0] == ["a.txt", "b.txt", "deep/er/a.txt"]
    assert read(open_source("text", patterns=(str(tmp_path / "a.*"),), base=Path("/")))[0] == ["a.md", "a.txt"]


def test_a_base_with_glob_signs_in_its_name_is_taken_literally(tmp_path: Path):
    base = tmp_path / "run[1]*"
    base.mkdir()
    (base / "x.txt").write_text("x")
    assert read(open_source("text", patterns=("*.txt",), base=base))[0] == ["x"]


def test_a_text_file_keeps_its_line_ends_and_loses_its_byte_order_mark(tmp_path: Path):
    (tmp_path / "x.txt").write_bytes(b"\xef\xbb\xbfa\r\nb\n")
    assert read(open_source("text", patterns=("x.txt",), base=tmp_path))[0] == ["a\r\nb\n"]


def test_a_pattern_without_files_names_the_absolute_pattern(tmp_path: Path):
    with pytest.raises(DataError, match="matches no file") as caught:
        open_source("text", patterns=("none/*.txt",), base=tmp_path)
    assert str(tmp_path / "none/*.txt") in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "patterns", "message"),
    [
        ("parquet", ("x",), "unknown source kind `parquet`"),
        ("text", (), "needs a pattern"),
        ("python_stdlib", ("*.py",), "takes no patterns"),
    ],
)
def test_what_cannot_be_a_source(kind: str, patterns: tuple[str, ...], message: str, tmp_path: Path):
    with pytest.raises(DataError, match=message):
        open_source(kind, patterns=patterns, base=tmp_path)


BAD_LINES: list[tuple[bytes, str]] = [
    (b'{"text": "\xff"}', "invalid UTF-8 at byte 10"),
    (b'{"text": ', "invalid JSON"),
    (b'{"body": "x"}', "no field `text`"),
    (b'{"text": 3}', "field `text` is a int, not a string"),
    (b'{"text": null}', "field `text` is a NoneType, not a string"),
    (b'{"text": ""}', "field `text` is empty"),
    (b'["text"]', "a JSON list, not an object"),
    (b'{"text": "\\ud800"}', "unpaired surrogate at character 0"),
    (b"[" * 100_000, "invalid JSON"),
]


@pytest.mark.parametrize(("line", "reason"), BAD_LINES)
def test_a_bad_line_is_reported_with_file_line_and_reason(line: bytes, reason: str, tmp_path: Path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "first"}\n\n' + line + b'\n{"text": "last"}')
    source = open_source("jsonl", patterns=("*.jsonl",), base=tmp_path, bad_record_limit=1)
    texts, log = read(source)
    assert texts == ["first", "last"]
    assert log.report.count == 1
    assert log.report.first[0].origin == f"{path}:3"
    assert reason in log.report.first[0].reason


def test_more_bad_records_than_the_limit_are_listed_in_the_error(tmp_path: Path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\n".join(line for line, _ in BAD_LINES[:3]))
    with pytest.raises(DataError, match="3 bad records, and the limit is 2") as caught:
        read(open_source("jsonl", patterns=("*.jsonl",), base=tmp_path, bad_record_limit=2))
    assert all(f"{path}:{line}: " in str(caught.value) for line in (1, 2, 3))


def test_every_bad_record_is_counted_and_the_first_few_are_kept(tmp_path: Path):
    (tmp_path / "x.jsonl").write_text("nonsense\n" * (KEPT + 5))
    _, log = read(open_source("jsonl", patterns=("*.jsonl",), base=tmp_path, bad_record_limit=100))
    assert log.report.count == KEPT + 5
    assert [record.origin.rpartition(":")[2] for record in log.report.first] == [str(n + 1) for n in range(KEPT)]


def test_json_lines_may_be_compressed_and_name_their_field(tmp_path: Path):
    with gzip.open(tmp_path / "x.jsonl.gz", "wt") as file:
        file.write(json.dumps({"body": "é\u2028"}) + "\r\n" + json.dumps({"body": "z"}))
    source = open_source("jsonl", patterns=("*.gz",), text_field="body", base=tmp_path)
    assert read(source)[0] == ["é\u2028", "z"]


def test_a_cut_off_archive_is_an_error_whatever_the_limit(tmp_path: Path):
    whole = gzip.compress(b'{"text": "x"}\n' * 1000)
    (tmp_path / "x.jsonl.gz").write_bytes(whole[: len(whole) - 12])
    with pytest.raises(DataError, match=r"x\.jsonl\.gz: cannot be read"):
        read(open_source("jsonl", patterns=("*.gz",), base=tmp_path, bad_record_limit=10**9))


@pytest.mark.parametrize("content", [b"", b"\xff\xfe"])
def test_an_unusable_text_file_is_a_bad_record(content: bytes, tmp_path: Path):
    (tmp_path / "x.txt").write_bytes(content)
    with pytest.raises(DataError, match=r"x\.txt: (empty text|invalid UTF-8)"):
        read(open_source("text", patterns=("*.txt",), base=tmp_path))


def test_the_fingerprint_follows_names_and_contents_but_not_the_place(tmp_path: Path):
    def fingerprint(folder: str, files: dict[str, str]) -> str:
        for name, text in files.items():
            path = tmp_path / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return open_source("text", patterns=("*",), base=tmp_path / folder).fingerprint()

    original = fingerprint("one", {"a": "xy", "b": "z"})
    assert fingerprint("moved", {"a": "xy", "b": "z"}) == original
    assert fingerprint("edited", {"a": "xy", "b": "Z"}) != original
    assert fingerprint("renamed", {"a": "xy", "c": "z"}) != original
    assert fingerprint("shifted", {"a": "x", "b": "yz"}) != original
