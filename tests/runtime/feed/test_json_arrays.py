"""A JSON array as a source: elements are records, wherever blocks, lines and numbers are cut."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.records import BadRecord, SourceRecord
from xtrain.runtime.feed.sources import files as json_arrays
from xtrain.runtime.feed.sources import files as opening
from xtrain.runtime.feed.sources.source import open_source

RECORDS = [{"text": f'é "[{index}]" ,{{\n 😀', "more": {"x": [1, -2.5e3, None, True]}} for index in range(12)]


def read(path: Path) -> list[SourceRecord | BadRecord]:
    source = open_source("jsonl", patterns=(str(path),), base=path.parent)
    units = list(source.units())
    assert sum(unit.size for unit in units) == path.stat().st_size == source.num_bytes()
    return [row for unit in units for row in source.read(unit)]


@pytest.mark.parametrize("indent", [None, 0, 2, "\t"])
@pytest.mark.parametrize("ascii", [True, False])
@pytest.mark.parametrize("block", [1, 7, 1 << 20])
def test_elements_are_records(indent: Any, ascii: bool, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(opening, "BLOCK", block)
    monkeypatch.setattr(json_arrays, "UNIT", 300)
    text = "\ufeff \n" + json.dumps(RECORDS, indent=indent, ensure_ascii=ascii) + "\n\n"
    for name in ("a.json", "a.json.gz"):
        path = tmp_path / name
        path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
        rows = read(path)
        assert [row.content for row in rows] == [record["text"] for record in RECORDS]  # type: ignore[union-attr]
        lines = [int(row.origin.rpartition(":")[2]) for row in rows]
        shown = text.splitlines()
        assert all("{" in shown[line - 1] for line in lines) and lines == sorted(lines)
        assert len(set(lines)) == (1 if indent is None else len(RECORDS))


def test_elements_that_are_no_records_are_bad_and_their_neighbours_are_not(tmp_path: Path):
    path = tmp_path / "a.json"
    path.write_bytes(
        b'[{"text": "a"},\n 12, {"text": 1},\n{"text": "b", "text": "c"}, {"text": "\xff"}, NaN, {"text": "d"}]'
    )
    reasons = [row.reason if isinstance(row, BadRecord) else row.content for row in read(path)]
    assert reasons == [
        "a", "it is a number, not a JSON object", "field `text` is a number, not a string",
        "invalid JSON: key `text` appears twice", "invalid UTF-8 at byte 10",
        "invalid JSON: NaN is not a valid JSON number", "d",
    ]  # fmt: skip


@pytest.mark.parametrize(("text", "line", "message"), [
    ('[{"text": "a"},\n{"text": "b"}', 2, "invalid JSON: the file ends in the middle of an array"),
    ('[{"text": "a"},\n{"text": "b"', 2, "invalid JSON: "),
    ("[ {", 1, "invalid JSON: "),
    ('[{"text": "a"},\n]', 2, "invalid JSON: a comma before the end of the array"),
    ('[{"text": "a"}\n{"text": "b"}]', 2, "invalid JSON: neither a comma nor the end of the array after an element"),
    ('[{"text": "a"}, x]', 1, "invalid JSON: Expecting value"),
    ('[{"text":\n"a"}]\n[{"text": "b"}]', 3, "invalid JSON: more after the array"),
    ('[{"text": ' + "[" * 100_000, 1, "invalid JSON: nested too deep"),
    ('{\n "text": "a"\n}\n', 1, "an object over several lines"),
    ('{"text":\n"a"}\n{"text":\n"b"}\n', 1, "an object over several lines"),
])  # fmt: skip
def test_what_is_no_array_says_where(text: str, line: int, message: str, tmp_path: Path):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError) as caught:
        read(tmp_path / "a.json")
    assert caught.value.message.startswith(message)
    assert (caught.value.path, caught.value.line) == (tmp_path / "a.json", line)
    assert "on one line" in f"{caught.value.remedy}" or "on each line" in f"{caught.value.remedy}"


@pytest.mark.parametrize("text", ["[]", '[{"text": "a"}]\n[{"text": "b"}]\n', '[]\n{"text": "a"}', "[1, 2]", "[[{}]]"])
def test_lines_that_are_lists_stay_lines(text: str, tmp_path: Path):
    (tmp_path / "a.json").write_text(text)
    rows = read(tmp_path / "a.json")
    assert len(rows) == len(text.splitlines())
    assert all(
        isinstance(row, BadRecord) == line.startswith("[") for row, line in zip(rows, text.splitlines(), strict=True)
    )
    assert rows[0].reason == "it is a list, not a JSON object"  # type: ignore[union-attr]


def test_an_array_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(opening, "BLOCK", 100)
    monkeypatch.setattr(json_arrays, "UNIT", 1000)
    records = [{"text": "x" * random.Random(index).randrange(1, 400)} for index in range(200)]
    (tmp_path / "a.json").write_text(json.dumps(records))
    source = open_source("jsonl", patterns=(str(tmp_path / "a.json"),), base=tmp_path)
    parts = [unit.part for unit in source.units()]
    assert max(sum(len(text) for _, text in part) for part in parts) < 1500
    assert sum(map(len, parts)) == 200
