"""Columns of JSON (`arrow.json`, which `datasets` makes of mixed types), and nulls that tables have for absent keys."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.records import Conversation, PreferencePair, SourceRecord
from xtrain.runtime.feed.sources.source import open_source

from .test_readers_columns import FORMATS, rows_of, write

PARTS = [{"role": "user", "content": [{"type": "text", "text": "what is it?"}]}, {"role": "assistant", "content": "b"}]
TALK, OTHER = PARTS, [PARTS[0], {"role": "assistant", "content": "c"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"default": None}}}}}


def as_json(values: list[Any]) -> pa.Array:
    return pa.array([None if value is None else json.dumps(value) for value in values], pa.json_())


def as_lists(values: list[list[Any]]) -> pa.Array:
    """list<json>, as `datasets` makes of lists whose items have different keys."""
    offsets = pa.array([sum(map(len, values[:index])) for index in range(len(values) + 1)], pa.int32())
    return pa.ListArray.from_arrays(offsets, as_json([item for value in values for item in value]))


def as_structs(values: list[list[Any]]) -> pa.Array:
    """list<struct>, each content JSON."""
    items = [item for value in values for item in value]
    kinds = pa.array([item["role"] for item in items]), as_json([item["content"] for item in items])
    offsets = pa.array([sum(map(len, values[:index])) for index in range(len(values) + 1)], pa.int32())
    return pa.ListArray.from_arrays(offsets, pa.StructArray.from_arrays(kinds, ["role", "content"]))


WAYS = {"json": as_json, "list<json>": as_lists, "list<struct<json>>": as_structs}
CHOSEN = {"form": "preference", "prompt": None, "chosen": "a", "rejected": "b"}
KTO = {"form": "instruction", "prompt": "a", "response": "b", "label": "ok"}
TOOLS = {"form": "chat", "messages": "a", "tools": "b"}
SYSTEM = {"form": "chat", "messages": "a", "system": "b"}
INPUT = {"form": "instruction", "prompt": "a", "response": "b", "input": "c"}
PAIR = PreferencePair(chosen=TALK, rejected=OTHER, prompt=1)
SAID = [{"role": "system", "content": "s"}, *TALK]


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", FORMATS)
def test_messages_of_json_are_what_it_says(way: Any, name: str, tmp_path: Path):
    path = write(pa.table({"messages": way([PARTS, OTHER])}), tmp_path / name)
    assert [row.content for row in rows_of(path, form="chat")] == [TALK, OTHER]  # type: ignore[union-attr]


@pytest.mark.parametrize(("reads", "columns", "expected"), [
    ({"text": "a"}, {"a": as_json(["x"])}, "x"),
    ({"text": "a.b.c"}, {"a": as_json([{"b": {"c": "x"}}])}, "x"),
    ({"text": "a.b.c"}, {"a": pa.StructArray.from_arrays([as_json([{"c": "x"}])], ["b"])}, "x"),
    (CHOSEN, {"a": as_lists([PARTS]), "b": as_json([OTHER])}, PAIR),
    (CHOSEN, {"a": as_json(["yes"]), "b": as_json(["no"])}, PreferencePair(chosen="yes", rejected="no")),
    ({**CHOSEN, "prompt": "p"}, {"p": as_json([PARTS[:1]]), "a": as_lists([PARTS[1:]]), "b": as_structs([OTHER[1:]])},
        PAIR),
    (TOOLS, {"a": as_lists([PARTS]), "b": as_lists([[TOOL]])}, Conversation(messages=TALK, tools=[TOOL])),
    (TOOLS, {"a": as_lists([PARTS]), "b": as_json([[TOOL]])}, Conversation(messages=TALK, tools=[TOOL])),
    (SYSTEM, {"a": as_lists([PARTS]), "b": as_json(["s"])}, Conversation(messages=SAID)),
    (SYSTEM, {"a": as_lists([PARTS]), "b": as_json([None])}, Conversation(messages=TALK)),
    (INPUT, {"a": ["q"], "b": as_json(["x"]), "c": as_json(["i"])},
        [{"role": "user", "content": "q\n\ni"}, {"role": "assistant", "content": "x"}]),
    (INPUT | {"input": None}, {"a": as_structs([PARTS[:1]]), "b": ["b"]}, Conversation(messages=TALK, prompt=1)),
])  # fmt: skip
def test_every_field_may_be_json(reads: dict[str, Any], columns: dict[str, Any], expected: Any, tmp_path: Path):
    path = write(pa.table(columns), tmp_path / "x.parquet")
    (row,) = rows_of(path, **reads)
    assert isinstance(row, SourceRecord), row
    assert row.content == expected


def test_kto_of_json(tmp_path: Path):
    path = write(pa.table({"a": as_lists([PARTS[:1]]), "b": as_json(["b"]), "ok": [True]}), tmp_path / "x.arrow")
    (row,) = rows_of(path, **KTO)
    assert isinstance(row, SourceRecord), row
    assert row.content.content == Conversation(messages=TALK, prompt=1)  # type: ignore[union-attr]


@pytest.mark.parametrize(("text", "reason"), [
    ("{", "field `messages`: invalid JSON in it: Expecting property name"),
    ('{"a": 1, "a": 2}', "field `messages`: invalid JSON in it: key `a` appears twice"),
    ("[" * 20_000, "field `messages`: invalid JSON in it: nested too deep"),
    ('"hi"', "field `messages` is a string, not a list of messages"),
])  # fmt: skip
def test_json_that_is_none_is_a_bad_record(text: str, reason: str, tmp_path: Path):
    table = pa.table({"messages": pa.array([text, json.dumps(TALK)], pa.json_())})
    bad, good = rows_of(write(table, tmp_path / "x.parquet"), form="chat")
    assert bad.reason.startswith(reason)  # type: ignore[union-attr]
    assert good.content == TALK  # type: ignore[union-attr]


def test_keys_that_a_row_does_not_have_are_absent_at_every_level(tmp_path: Path):
    def talk(name: str, arguments: Any) -> list[Any]:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        return [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]

    def tool(name: str, properties: Any) -> list[Any]:
        return [{"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}]

    records = [
        (talk("weather", {"city": "Rome"}), tool("weather", {"city": {"type": "string"}})),
        (talk("sum", {"of": [{"a": 1}, {"b": 2}]}),
            tool("sum", {"of": {"type": "array", "items": {"type": "number"}}})),
    ]  # fmt: skip
    table = pa.table({"messages": [record[0] for record in records], "tools": [record[1] for record in records]})
    path = write(table, tmp_path / "x.parquet")
    rows = rows_of(path, form="chat", tools="tools")
    assert [(row.content.messages, row.content.tools) for row in rows] == records  # type: ignore[union-attr]


def test_nulls_that_are_written_out_are_kept(tmp_path: Path):
    calls = [{"name": "f", "arguments": {"city": None}}]
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    lines, table = tmp_path / "x.jsonl", tmp_path / "x.parquet"
    lines.write_text(json.dumps({"messages": talk, "tools": [TOOL]}))
    write(pa.table({"messages": as_lists([talk]), "tools": as_lists([[TOOL]])}), table)
    for kind, path in (("jsonl", lines), ("parquet", table)):
        reads = {"form": "chat", "tools": "tools"}
        source = open_source(kind, patterns=(str(path),), reads=reads, base=tmp_path)
        (row,) = [row for unit in source.units() for row in source.read(unit)]
        assert row.content.messages[1]["tool_calls"][0]["arguments"] == {"city": None}, kind  # type: ignore[union-attr]
        assert row.content.tools == [TOOL], kind  # type: ignore[union-attr]


def test_maps_are_objects(tmp_path: Path):
    function = pa.struct([("name", pa.string()), ("arguments", pa.map_(pa.string(), pa.string()))])
    message = pa.struct([("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.list_(function))])
    call = {"name": "f", "arguments": [("city", "Rome"), ("unit", None)]}
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    path = write(
        pa.table({"messages": pa.array([talk], pa.list_(message)), "tools": as_json([[TOOL]])}), tmp_path / "x.arrow"
    )
    (row,) = rows_of(path, form="chat", tools="tools")
    assert row.content.messages[1]["tool_calls"] == [{"name": "f", "arguments": {"city": "Rome", "unit": None}}]  # type: ignore[union-attr]


@pytest.mark.parametrize("saved", [False, True])
def test_a_folder_of_lines_is_read_as_its_lines(saved: bool, tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    called = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    records = [{"messages": PARTS}, {"messages": TALK}, {"messages": called}]
    folder, lines = tmp_path / "r1", tmp_path / "r1" / "a.jsonl"
    folder.mkdir()
    lines.write_text("".join(json.dumps(record) + "\n" for record in records))
    name = str(folder)
    if saved:
        datasets.load_dataset(name, split="train", cache_dir=str(tmp_path / "cache")).save_to_disk(
            name := f"{folder}-saved"
        )
    reads = {"form": "chat"}
    hub = open_source(
        "huggingface", options={"name": name, "config": None, "split": "train"}, reads=reads, base=tmp_path
    )
    plain = open_source("jsonl", patterns=(str(lines),), reads=reads, base=tmp_path)
    found = [[row.content for unit in source.units() for row in source.read(unit)] for source in (hub, plain)]  # type: ignore[union-attr]
    assert found[0] == found[1]
    assert found[0][0] == TALK


def test_a_column_of_other_values_is_still_refused(tmp_path: Path):
    path = write(pa.table({"messages": [[1, 2]]}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"column `messages` is list<.*>, not a list of messages"):
        rows_of(path, form="chat")
