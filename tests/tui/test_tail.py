"""Reading a file that another process is writing."""

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from read_records import typed

from xtrain.records.lines import Event, line_of
from xtrain.tui.feed import RecordFeed, Tail


def add(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_missing_file_then_lines(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "gone" / "x.jsonl")
    assert tail.read() == []
    tail.path.parent.mkdir()
    add(tail.path, b'{"a": 1}\n{"a": 2}\n')
    assert tail.read() == [{"a": 1}, {"a": 2}]
    assert tail.read() == []


def test_partial_line_waits_for_its_end(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "x.jsonl")
    data = '{"text": "猫"}\n'.encode()
    torn = data.index("猫".encode()) + 1  # inside the character
    add(tail.path, b'{"a": 1}\n' + data[:torn])
    assert tail.read() == [{"a": 1}]
    assert tail.read() == []
    add(tail.path, data[torn:])
    assert tail.read() == [{"text": "猫"}]
    assert tail.damaged == 0


def test_damaged_lines_are_counted_and_passed_over(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "x.jsonl")
    add(tail.path, b'{"a": 1\n[1]\n\n\xff\xfe\n' + b"[" * 100_000 + b'\n{"a": 2}\n')
    assert tail.read() == [{"a": 2}]
    assert tail.damaged == 4


def test_starts_at_an_offset(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    add(path, b'{"a": 1}\n')
    tail = Tail(path, path.stat().st_size)
    add(path, b'{"a": 2}\n')
    assert tail.read() == [{"a": 2}]


def test_truncated_or_replaced_file_is_read_from_its_start(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "x.jsonl")
    add(tail.path, b'{"a": 1}\n{"a": 2}\n')
    tail.read()
    tail.path.write_bytes(b'{"a": 3}\n')
    assert tail.read() == [{"a": 3}]
    other = tmp_path / "other"
    other.write_bytes(b'{"a": 4}\n{"a": 5}\n{"a": 6}\n')
    other.rename(tail.path)
    assert tail.read() == [{"a": 4}, {"a": 5}, {"a": 6}]


def test_disappearing_file_goes_on_where_it_was(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "x.jsonl")
    add(tail.path, b'{"a": 1}\n')
    tail.read()
    away = tail.path.rename(tmp_path / "away")
    assert tail.read() == []
    away.rename(tail.path)
    add(tail.path, b'{"a": 2}\n')
    assert tail.read() == [{"a": 2}]


@given(st.lists(st.dictionaries(st.text(max_size=3), st.text(max_size=20), max_size=3), max_size=8), st.data())
def test_any_cuts_give_the_same_records(tmp_path_factory, records, data) -> None:
    """However writes and reads interleave, and however small the chunks, every record comes once and in order."""
    path = tmp_path_factory.mktemp("tail") / "x.jsonl"
    content = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=5)))
    tail = Tail(path, chunk_bytes=data.draw(st.integers(1, 40)))
    read = []
    for begin, end in zip([0, *cuts], [*cuts, len(content)], strict=True):
        add(path, content[begin:end])
        read += tail.read()
    while tail.behind:
        read += tail.read()
    assert read == records
    assert tail.damaged == 0


def test_feed_merges_by_time_whatever_the_chunks(tmp_path: Path, append, recorded) -> None:
    append(tmp_path, *recorded)
    for chunk_bytes in (100, 1000, 1 << 20):
        feed = RecordFeed(tmp_path, chunk_bytes=chunk_bytes)
        read = feed.read()
        while feed.behind:
            read += feed.read()
        assert list(map(line_of, read)) == [line_of(typed(record)) for record in recorded]


def test_feed_gives_a_step_before_the_events_of_the_same_instant(tmp_path: Path, append, event, metrics) -> None:
    append(tmp_path, event("eval", 5, 1), metrics(1, 5))
    assert [isinstance(record, Event) for record in RecordFeed(tmp_path).read()] == [False, True]


def test_feed_keeps_the_order_of_a_file_when_a_clock_is_set_back(tmp_path: Path, append, metrics) -> None:
    append(tmp_path, metrics(1, 10), metrics(2, 4), metrics(3, 5))
    assert [record.step for record in RecordFeed(tmp_path).read()] == [1, 2, 3]


@pytest.mark.parametrize("offset", [False, True])
def test_what_is_left_of_a_file_that_was_cut_is_not_read_again(tmp_path: Path, offset: bool) -> None:
    """As when a run goes back, and takes the records of the discarded steps out of its file."""
    path = tmp_path / "metrics.jsonl"

    def lines(*records: tuple[int, float]) -> bytes:
        return b"".join(json.dumps({"step": step, "time": when}).encode() + b"\n" for step, when in records)

    add(path, lines((1, 1.0), (2, 2.0), (3, 3.0)))
    feed = RecordFeed(tmp_path, {"metrics.jsonl": path.stat().st_size} if offset else None)
    assert [record.step for record in feed.read()] == ([] if offset else [1, 2, 3])
    rest = tmp_path / "rest"
    rest.write_bytes(lines((1, 1.0)))
    rest.rename(path)
    now = time.time() + 1
    add(path, lines((2, now), (3, now + 1)))
    assert [record.step for record in feed.read()] == [2, 3]
    add(path, lines((4, 5.0)))
    assert [record.step for record in feed.read()] == [4], "a clock set back hides nothing"


def test_a_line_without_end_is_passed_over_with_what_follows(tmp_path, monkeypatch):
    monkeypatch.setattr("xtrain.tui.feed.LONGEST_LINE", 1000)
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"a": 1}\n' + bytes(10_000))
    tail = Tail(path, chunk_bytes=100)
    assert tail.read() == [{"a": 1}]
    assert tail.read() == [] and tail.damaged == 1 and not tail.behind and tail.offset == 10_009
    with path.open("ab") as file:
        file.write(b'\n{"a": 2}\n')
    assert tail.read() == [{"a": 2}]


def test_only_a_regular_file_is_read(tmp_path):
    os.mkfifo(tmp_path / "events.jsonl")
    assert Tail(tmp_path / "events.jsonl").read() == []
