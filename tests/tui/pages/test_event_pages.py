"""The events of a run as rows: the list, one in full, and the ends of logs."""

import os
import time
from typing import Any

import pytest
from attrs import evolve
from rich.cells import cell_len

from xtrain.records.events import event_of
from xtrain.records.training_events import GenerateEvent
from xtrain.tui.event_text import in_one_line
from xtrain.tui.model.event_log import EventLog, LogEntry, LogTail
from xtrain.tui.pages.events import (
    EventsPage,
    EventsView,
    back,
    clock,
    detail,
    entered,
    moved,
    newest,
    other_kinds,
    other_log,
    page,
    searched,
)
from xtrain.tui.pages.sheet import plain

START = 1_795_000_000.0
TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 3, in go\n    raise RuntimeError("boom")'
RECORDS: list[dict[str, Any]] = [
    {"event": "run_start", "step": 0, "name": "moe", "attempt": 1, "world_size": 4, "device": "cpu", "steps": 60},
    {"event": "setup_begin", "step": 0, "node": "setup.mesh"},
    {"event": "setup", "step": 0, "node": "setup.mesh", "seconds": 0.4, "detail": "a mesh"},
    *({"event": "eval", "step": step, "dataset": "web", "loss": 3.0 - step / 100} for step in range(10, 60, 10)),
    {"event": "checkpoint", "step": 50, "path": "/runs/moe/r/checkpoints/ckpt-50", "bytes": 2048, "seconds": 0.5},
    {"event": "generate", "step": 55, "samples": [{"prompt": "def main", "text": "def main():\n    " + "go " * 40}]},
    {"event": "alert", "step": 56, "kind": "loss_spike", "message": "loss 4.2 is far up", "state": "raised"},
    {"event": "alert", "step": 57, "kind": "loss_spike", "message": "loss is as before", "state": "cleared"},
    {"event": "failure", "step": 58, "rank": 1, "error": "RuntimeError: boom", "exit_code": 1, "traceback": TRACEBACK},
    {"event": "run_end", "step": 58, "status": "failed", "exit_code": 1, "seconds": None, "loss": None},
]


@pytest.fixture(autouse=True)
def _one_zone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    os.environ.pop("TZ", None)
    time.tzset()


def log(records: list[dict[str, Any]] | None = None, **fields: Any) -> EventLog:
    entries = []
    for number, record in enumerate(RECORDS if records is None else records):
        timed = {"time": START + 60 * number, **record}
        event = event_of(timed)
        text, kind = in_one_line(event), event.event
        entries.append(LogEntry(number=number, time=event.time, step=event.step, kind=kind, text=text, event=event))
    return EventLog(entries=tuple(entries), version=len(entries), **fields)


def rows(found: EventsPage) -> list[str]:
    return [plain(row).rstrip() for row in found.rows]


def text(found: EventsPage) -> str:
    return "\n".join(rows(found))


@pytest.mark.parametrize(("width", "height"), [(200, 44), (120, 36), (80, 20), (60, 16), (40, 8), (20, 3), (5, 1)])
@pytest.mark.parametrize("view", [EventsView(), EventsView(shows="detail"), EventsView(log="a.log")])
def test_every_size_is_filled_exactly(width: int, height: int, view: EventsView) -> None:
    tails = (LogTail(name="a.log", lines=("猫" * 80, "x" * 300, ""), cut=True, size=9),)
    for found in (page(log(logs=tails), view, width, height), page(EventLog(), view, width, height)):
        assert len(found.rows) == height
        assert {cell_len(plain(row)) for row in found.rows} == {width}


def test_the_list_says_when_where_and_what() -> None:
    found = rows(page(log(), EventsView(), 80, 20, directory="/runs/moe/r"))
    assert found[0].startswith("Events ──") and found[0].endswith("13 events · newest")
    assert found[2] == "  11:06:40    0 run_start   moe  attempt 1  4 ranks on cpu  60 steps"
    assert "  11:14:40   50 checkpoint  checkpoints/ckpt-50  2.0 KiB  0.50 s" in found
    assert "! 11:16:40   56 alert       loss_spike  loss 4.2 is far up" in found
    assert "  11:17:40   57 alert       loss_spike  over: loss is as before" in found
    assert "✗ 11:18:40   58 failure     rank 1  RuntimeError: boom" in found


def test_paths_of_the_run_are_shown_from_the_run_on() -> None:
    saved = [{"event": "checkpoint", "step": 5, "path": "runs/moe/r/checkpoints/ckpt-5"}]
    assert " 5 checkpoint  checkpoints/ckpt-5" in text(page(log(saved), EventsView(), 80, 5, directory="/else/moe/r"))
    assert "  runs/moe/r/checkpoints/ckpt-5" in text(page(log(saved), EventsView(), 80, 5))
    assert "  runs/moe/r/checkpoints/ckpt-5" in text(page(log(saved), EventsView(), 80, 5, directory="/runs/moe/q"))


def test_a_failure_stays_above_everything_until_another_attempt() -> None:
    failed = log()
    assert rows(page(failed, EventsView(chosen=0), 80, 6))[1] == "✗ failure at step 58: rank 1  RuntimeError: boom"
    assert "✗ failure at step 58" in text(page(failed, EventsView(), 80, 6))
    again = log([*RECORDS, {"event": "run_start", "step": 50, "name": "moe", "attempt": 2}])
    assert "failure at" not in text(page(again, EventsView(), 80, 20))


def test_a_node_that_begins_is_shown_until_it_has_ended() -> None:
    assert "setup_begin" not in text(page(log(), EventsView(), 80, 20))
    under_way = log([*RECORDS[:2]])
    assert "setup_begin setup.mesh" in text(page(under_way, EventsView(), 80, 20))


def test_the_newest_is_followed_until_another_is_chosen() -> None:
    many = [{"event": "warning", "step": step, "message": f"number {step}"} for step in range(50)]
    found = page(log(many), EventsView(), 60, 10)
    assert "number 49" in rows(found)[-1] and found.rows[-1][0][1].endswith("cursor")
    one_up = page(log(many), moved(found, -1), 60, 10)
    assert one_up.view.chosen == 48 and "not following" in rows(one_up)[0]
    more = page(log([*many, {"event": "warning", "step": 50, "message": "number 50"}]), one_up.view, 60, 10)
    assert more.entries[more.place].step == 48 and "number 50" not in text(more)
    assert moved(page(log(many), one_up.view, 60, 10), 1).chosen is None
    assert newest(more).chosen is None
    up = page(log(many), moved(found, 1 - found.height), 60, 10)
    assert up.entries[up.place].step == 49 - 8
    first = page(log(many), moved(found, -1000), 60, 10)
    assert first.place == 0 and "number 0" in rows(first)[1]


def test_events_are_chosen_by_kind_and_text() -> None:
    found = page(log(), EventsView(), 80, 20)
    seen = []
    for _ in range(20):
        found = page(log(), other_kinds(found, 1), 80, 20)
        seen.append(found.view.kinds)
    assert seen[:3] == ["problems", "run_start", "setup_begin"] and "all" in seen
    assert page(log(), other_kinds(page(log(), EventsView(), 80, 20), -1), 80, 20).view.kinds == "run_end"
    problems = page(log(), EventsView(kinds="problems"), 80, 20)
    assert [entry.kind for entry in problems.entries] == ["alert", "alert", "failure"]
    evals = page(log(), searched(problems, "WEB"), 80, 20)
    assert not evals.entries and "no event of this kind with this text" in text(evals)
    evals = page(log(), evolve(evals.view, kinds="all"), 80, 20)
    assert len(evals.entries) == 5 and "“WEB” · 5 of 13 · newest" in rows(evals)[0]
    assert back(evals) == EventsView(top=evals.view.top)


def test_the_chosen_event_is_below_the_list_where_there_is_room() -> None:
    tall = text(page(log(), EventsView(), 100, 30))
    assert "run_end · step 58 · 2026-11-18 11:19:40 ─" in tall and "exit_code  1" in tall
    assert "exit_code" not in text(page(log(), EventsView(), 100, 20))


def test_a_failure_in_full_has_its_traceback_as_it_was() -> None:
    found = page(log(), entered(page(log(), EventsView(kinds="failure"), 80, 20)), 80, 20)
    lines = rows(found)
    assert lines[0].startswith("failure · step 58 · 2026-11-18 11:18:40 ──")
    assert lines[1:5] == [
        "rank 1 RuntimeError: boom", "Traceback (most recent call last):", '  File "x.py", line 3, in go',
        '    raise RuntimeError("boom")',
    ]  # fmt: skip
    assert "rank       1" in lines and "exit_code  1" in lines
    assert entered(found).shows == "list" and back(found).shows == "list"


def test_what_a_model_wrote_is_there_to_its_last_word() -> None:
    (entry,) = (entry for entry in log().entries if entry.kind == "generate")
    lines = [plain(row) for row in detail(entry, 40)]
    written = "".join(lines[1:-1])
    assert lines[0] == "sample 1" and written.count("go") == 40
    assert detail(entry, 40)[1][0] == ("def main", "bold")
    assert lines[2].startswith("    go ")
    assert isinstance(entry.event, GenerateEvent)
    assert written == entry.event.samples[0].text.replace("\n", "")


def test_a_long_event_is_scrolled() -> None:
    record = {"event": "failure", "step": 1, "rank": 0, "error": "e", "traceback": "\n".join(map(str, range(100)))}
    found = page(log([record]), EventsView(shows="detail"), 60, 11)
    assert "1–10 of" in rows(found)[0] and rows(found)[2] == "0"
    found = page(log([record]), moved(found, found.height - 1), 60, 11)
    assert rows(found)[1] == "8"
    assert page(log([record]), moved(found, -100), 60, 11).view.scroll == 0
    end = page(log([record]), moved(found, 1000), 60, 11)
    assert end.view.scroll == end.lines - 10


def test_logs_are_shown_from_their_end() -> None:
    tails = (
        LogTail(name="rank-00000.log", lines=tuple(f"line {n}" for n in range(30)), cut=True, size=9),
        LogTail(name="rank-00001.log", lines=(), cut=False, size=0),
    )
    several = log(logs=tails)
    found = page(several, other_log(page(several, EventsView(), 60, 11)), 60, 11)
    assert rows(found)[0].endswith("log 1 of 2 · its end only · newest") and rows(found)[-1] == "line 29"
    up = page(several, moved(found, -5), 60, 11)
    assert rows(up)[-1] == "line 24" and "not following" in rows(up)[0]
    assert moved(up, 5).scroll is None  # at its end it is followed again
    only = page(several, searched(up, "line 1"), 60, 20)
    assert [line for line in rows(only)[1:] if line] == ["line 1", *(f"line {n}" for n in range(10, 20))]
    empty = page(several, other_log(found), 60, 11)
    assert "empty" in text(empty) and other_log(empty).log == ""
    assert back(found).log == ""
    assert page(log(), EventsView(log="gone.log"), 60, 11).view.log == ""


def test_texts_cannot_steer_the_terminal() -> None:
    wild = [{"event": "warning\x1b", "step": 1, "message": "\x1b[2Jx\ny"}]
    tails = (LogTail(name="a.log", lines=("\x1b[31mred",), cut=False, size=1),)
    for view in (EventsView(), EventsView(shows="detail"), EventsView(log="a.log")):
        assert "\x1b" not in text(page(log(wild, logs=tails), view, 60, 30))


def test_times_that_are_none() -> None:
    assert clock(None) == "–" and clock(1e30) == "–" and clock(START) == "11:06:40"
