"""Sources: which files, in which order, what is known of them, and what cannot be one."""

import pickle
from pathlib import Path

import pytest

from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.records import MOST_SHOWN, BadRecord, BadRecordReport, SourceRecord
from xtrain.runtime.feed.sources.source import DataSource, open_source


def read(source: DataSource, limit: int | None = None) -> tuple[list[str], BadRecordReport]:
    """The texts of a source, each unit read by a copy of it, as another process would."""
    limit = source.bad_record_limit if limit is None else limit
    report = BadRecordReport()
    copy = pickle.loads(pickle.dumps(source))
    texts: list[str] = []
    for unit in source.units():
        for record in copy.read(pickle.loads(pickle.dumps(unit))):
            if isinstance(record, BadRecord):
                report = report.including(record)
                report.check(limit)
            else:
                assert isinstance(record.content, str)
                texts.append(record.content)
    return texts, report


def test_the_standard_library_is_read_in_order_of_name():
    source = open_source("python_stdlib", base=Path("/nowhere"))
    records = [record for unit in source.units() for record in source.read(unit)]
    origins = [record.origin for record in records if isinstance(record, SourceRecord)]
    assert origins == sorted(origins)
    assert {"argparse.py", "os.py"} <= {Path(origin).name for origin in origins}
    assert all(Path(origin).parent == source.base for origin in origins)
    assert source.bad_record_limit is None


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


def test_a_file_whose_name_looks_like_a_pattern_is_read(tmp_path: Path):
    (tmp_path / "[a].txt").write_text("[a]")
    assert read(open_source("text", patterns=("[a].txt",), base=tmp_path))[0] == ["[a]"]
    (tmp_path / "a.txt").write_text("a")
    assert read(open_source("text", patterns=("[a].txt",), base=tmp_path))[0] == ["a"]  # a pattern all the same
    with pytest.raises(DataError, match=r"a `\[` that belongs to a name is written `\[\[\]`"):
        open_source("text", patterns=("data[1]/*.txt",), base=tmp_path)


def test_a_pattern_without_files_names_the_absolute_pattern(tmp_path: Path):
    with pytest.raises(DataError, match="matches no file") as caught:
        open_source("text", patterns=("none/*.txt",), base=tmp_path)
    assert str(tmp_path / "none/*.txt") in str(caught.value)


def test_a_folder_is_no_file_and_a_link_to_nothing_is_not_passed_over(tmp_path: Path):
    (tmp_path / "data").mkdir()
    with pytest.raises(DataError, match=r"matches a folder[^\n]*data\n.*`data/\*`"):
        open_source("jsonl", patterns=("data",), base=tmp_path)
    (tmp_path / "data" / "a.txt").write_text("a")
    (tmp_path / "data" / "b.txt").symlink_to(tmp_path / "gone.txt")
    with pytest.raises(DataError, match=r"b\.txt: a broken link"):
        open_source("text", patterns=("data/*",), base=tmp_path)


@pytest.mark.parametrize(("kind", "patterns", "message"), [
    ("csv", ("x",), "unknown source kind `csv`"),
    ("text", (), "needs a pattern"),
    ("parquet", (), "needs a pattern"),
    ("python_stdlib", ("*.py",), "takes no patterns"),
    ("synthetic", ("*.py",), "takes no patterns"),
])  # fmt: skip
def test_what_cannot_be_a_source(kind: str, patterns: tuple[str, ...], message: str, tmp_path: Path):
    with pytest.raises(DataError, match=message):
        open_source(kind, patterns=patterns, base=tmp_path)


def test_more_bad_records_than_the_limit_are_listed_in_the_error(tmp_path: Path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"{}\n[]\nnothing\n")
    with pytest.raises(DataError, match="3 bad records, but the limit is 2") as caught:
        read(open_source("jsonl", patterns=("*.jsonl",), base=tmp_path, bad_record_limit=2))
    assert all(f"{path}:{line}: " in str(caught.value) for line in (1, 2, 3))


def test_every_bad_record_is_counted_and_the_first_few_are_kept(tmp_path: Path):
    (tmp_path / "x.jsonl").write_text("nonsense\n" * (MOST_SHOWN + 5))
    _, report = read(open_source("jsonl", patterns=("*.jsonl",), base=tmp_path, bad_record_limit=100))
    assert report.count == MOST_SHOWN + 5
    assert [record.origin.rpartition(":")[2] for record in report.first] == [str(n + 1) for n in range(MOST_SHOWN)]


def test_the_fingerprint_follows_names_and_contents_but_not_the_place(tmp_path: Path):
    def fingerprint(folder: str, files: dict[str, str]) -> str:
        for name, text in files.items():
            path = tmp_path / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return open_source("text", patterns=("*",), base=tmp_path / folder).fingerprints()[0]

    original = fingerprint("one", {"a": "xy", "b": "z"})
    assert fingerprint("moved", {"a": "xy", "b": "z"}) == original
    assert fingerprint("edited", {"a": "xy", "b": "Z"}) != original
    assert fingerprint("renamed", {"a": "xy", "c": "z"}) != original
    assert fingerprint("shifted", {"a": "x", "b": "yz"}) != original


def test_the_fingerprint_covers_the_kind_every_option_and_the_fields(tmp_path: Path):
    (tmp_path / "x.npy").write_bytes(b"")
    options = {"documents": 10, "length": 20, "spread": 0.5, "seed": 1}
    sources = [
        open_source("text", patterns=("*",), base=tmp_path),
        open_source("jsonl", patterns=("*",), base=tmp_path),
        open_source("jsonl", patterns=("*",), reads={"form": "text", "text": "body"}, base=tmp_path),
        open_source("jsonl", patterns=("*",), reads={"form": "chat", "messages": "text"}, base=tmp_path),
        open_source("tokens", patterns=("*",), options={"dtype": None, "separator": 0}, base=tmp_path),
        open_source("tokens", patterns=("*",), options={"dtype": None, "separator": 1}, base=tmp_path),
        open_source("synthetic", options=options, base=tmp_path),
        open_source("synthetic", options=options | {"seed": 2}, base=tmp_path),
    ]
    assert len({source.fingerprints()[0] for source in sources}) == len(sources)
