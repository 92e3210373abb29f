"""Records: what is written is read again, and so are the files of runs of before, whoever wrote them."""

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import record_tables
from examples import drawn
from hypothesis import given
from hypothesis import strategies as st

from xtrain.dsl.schema.actions import ACTIONS
from xtrain.records.events import EVENT_TYPES, FailureEvent, RunEndEvent, WarningEvent, event_of, events_of
from xtrain.records.lines import (
    Event,
    Record,
    UnknownEvent,
    as_object,
    line_of,
    object_of,
    objects,
    objects_since,
    plain_value,
    read,
    read_all,
)
from xtrain.records.metrics import FREE_NAMES, RankMetrics, StepMetrics
from xtrain.records.names import EVENTS_FILE, METRICS_FILE, heartbeat_path, rank_lines_path
from xtrain.records.status import WIDTH, ControlRequest, Heartbeat, read_heartbeat
from xtrain.records.training_events import CheckpointEvent, EvalEvent, GeneratedText, GenerateEvent, RunStartEvent

# The files of a run of six steps on two ranks, as they were written before records had types.
BEFORE = Path(__file__).parent / "data" / "six_steps"
RECORDS: list[type[Record]] = [StepMetrics, RankMetrics, *EVENT_TYPES.values()]


def _is_documented(key: str) -> bool:
    """Whether a key with a name in it is one of those that docs/metrics.md explains."""
    known = [*FREE_NAMES, *(name for kind in ACTIONS.values() for name in kind.metrics)]
    patterns = (pattern.replace("NAME", "*").replace("LAYER", "*") for pattern in known)
    return any(Path(key).match(pattern) for pattern in patterns)


@pytest.mark.parametrize("name", [METRICS_FILE, EVENTS_FILE, "ranks/00000.jsonl", "ranks/00001.jsonl"])
def test_every_key_of_the_files_of_before_is_a_field(name: str) -> None:
    found = objects_since(BEFORE / name)
    kind = StepMetrics if name == METRICS_FILE else RankMetrics
    records = events_of(found) if name == EVENTS_FILE else read_all(kind, found)
    assert len(records) >= 6
    for record, before in zip(records, found, strict=True):
        assert not isinstance(record, UnknownEvent)
        assert all(map(_is_documented, record.rest)) and (not record.rest or name == METRICS_FILE)
        assert json.loads(line_of(record)) == before
    if name == EVENTS_FILE:
        (start,) = (each for each in records if isinstance(each, RunStartEvent))
        assert (start.name, start.world_size, start.resumed_step) == ("six_steps", 2, None)
        samples = [each.samples for each in records if isinstance(each, GenerateEvent)]
        assert samples[0] == [GeneratedText(prompt="ab", text="caacicfa")]
        assert isinstance(records[-1], RunEndEvent) and records[-1].status == "done"


def test_heartbeats_and_requests_of_before_are_read() -> None:
    for rank in (0, 1):
        beat = read_heartbeat(heartbeat_path(BEFORE, rank))
        assert beat is not None and beat.rank == rank and beat.step == 6 and beat.progress == (6, beat.within)
        assert rank_lines_path(BEFORE, rank).is_file()
    (path,) = (BEFORE / "control").glob("*.json")
    request = msgspec.json.decode(path.read_bytes(), type=ControlRequest)
    assert (request.command, request.arg) == ("eval", "words")


def test_numbers_that_json_has_no_word_for_are_text_and_come_back() -> None:
    metrics = StepMetrics(
        step=1, time=2.0, loss=math.nan, grad_norm=-math.inf, rest={"eval/a/loss": math.inf, "x": [1.5]}
    )
    line = line_of(metrics)
    assert json.loads(line) == {
        "step": 1, "time": 2.0, "loss": "nan", "grad_norm": "-inf", "eval/a/loss": "inf", "x": [1.5],
    }  # fmt: skip
    again = read(StepMetrics, json.loads(line))
    assert math.isnan(again.loss or 0) and again.grad_norm == -math.inf and again.rest["eval/a/loss"] == "inf"
    loads = line_of(StepMetrics(step=1, rest={"moe/load/0": [0.5, math.nan], "deep": {"a": math.inf}}))
    assert json.loads(loads)["moe/load/0"] == [0.5, "nan"] and json.loads(loads)["deep"] == {"a": "inf"}


def test_numbers_of_other_libraries_are_written() -> None:
    numpy = pytest.importorskip("numpy")
    line = line_of(StepMetrics(step=1, loss=numpy.float64(1.5), rest={"a": numpy.float64("nan")}))
    assert json.loads(line)["loss"] == 1.5 and json.loads(line)["a"] == "nan"
    with pytest.raises(TypeError, match="a object cannot be written"):
        line_of(StepMetrics(step=1, rest={"a": object()}))


def test_what_is_no_text_is_written_all_the_same() -> None:
    line = line_of(WarningEvent(step=1, message="a file \udcff"))
    assert line.decode() and json.loads(line)["message"] == "a file \udcff"
    said = event_of(object_of(line) or {})
    assert isinstance(said, WarningEvent) and said.message == "a file \udcff"
    found = object_of(b'{"event": "generate", "time": 1, "samples": [{"text": "a", "\\ud800": 1}], "\\ud800": 2}') or {}
    assert event_of(found).rest["\ud800"] == 2


def test_keys_that_say_nothing_are_left_out_and_those_that_must_be_there_are_null() -> None:
    end = as_object(RunEndEvent(step=3, status="failed", exit_code=1, seconds=None, loss=None))
    assert [*end] == ["step", "time", "event", "status", "exit_code", "seconds", "loss"] and end["loss"] is None
    failure = FailureEvent(step=3, rank=1, error="boom", exit_code=1, traceback="", lost=True)
    assert as_object(failure).keys() - end.keys() == {"rank", "error", "traceback", "lost"}
    assert isinstance(as_object(failure)["time"], float)


def test_a_key_of_another_type_is_none_and_not_lost() -> None:
    found = {"event": "checkpoint", "step": "x", "time": 1, "bytes": 2.0, "best": {"a": 1, "b": "c"}, "new": [1]}
    saved = event_of(found)
    assert isinstance(saved, CheckpointEvent)
    assert (saved.step, saved.time, saved.bytes, saved.best, saved.path) == (None, 1.0, 2, {"a": 1.0}, "")
    assert saved.rest == {"new": [1], "step": "x"}
    missing = event_of({"event": "eval"})
    assert isinstance(missing, EvalEvent) and missing.time is None and missing.loss is None and missing.dataset == ""


def test_an_unknown_event_keeps_all_it_says() -> None:
    found = {"time": 1.0, "step": 3, "event": "invented", "colour": "red"}
    event = event_of(found)
    assert isinstance(event, UnknownEvent) and event.event == "invented" and event.step == 3
    assert json.loads(line_of(event)) == found


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["nan", "inf"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.data())
@drawn(75, 1500)
def test_whatever_is_in_a_line_is_read(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(RECORDS))
    names = [*kind.__struct_encode_fields__[:-1], "other", "rest", ""]
    found: dict[str, Any] = data.draw(st.dictionaries(st.sampled_from(names), _VALUES, max_size=8))
    if issubclass(kind, Event):
        record: Record = event_of({"event": kind.__struct_config__.tag, **found})
        assert isinstance(record, kind)
    else:
        record = read(kind, found)
    assert line_of(record).endswith(b"\n")
    assert all(key in record.rest or key in kind.__struct_encode_fields__ for key in found)


def test_damaged_lines_are_counted_and_cost_nothing_else() -> None:
    block = b'{"step":1}\n{"step":4,"lo\n[1,2]\n\xff\xfe\n{"loss":NaN}\n\n"text"\n{"step":2}\n'
    found, damaged = objects(block)
    assert [*map(len, found)] == [1, 1, 1] and math.isnan(found[1]["loss"]) and damaged == 4
    assert objects(b"") == ([], 0) and object_of(b"[1]") is None and object_of(b"[" * 100_000) is None


def test_a_heartbeat_is_always_as_wide(tmp_path: Path) -> None:
    beat = Heartbeat(
        rank=3, host="h", pid=1, born=2, attempt=1, alive=4, time=5.0, step=6, node="step.agree", marks=7, within=8,
        lasting=False, idle=0.5, place="a\udcff", debugger=False,
    )  # fmt: skip
    line = beat.line()
    path = tmp_path / "beat"
    path.write_bytes(line)
    assert len(line) == WIDTH and read_heartbeat(path) == beat
    newer = {**json.loads(line), "temperature": 70}
    path.write_text(json.dumps(newer).ljust(WIDTH))
    assert read_heartbeat(path) is not None
    for damaged in (line[:100], b"", json.dumps({**newer, "alive": "x"}).encode()):
        path.write_bytes(damaged)
        assert read_heartbeat(path) is None
    assert read_heartbeat(tmp_path / "none") is None


def test_every_field_is_documented() -> None:
    for kind in (*RECORDS, Heartbeat, ControlRequest):
        assert kind.__doc__, kind
        for field in msgspec.inspect.type_info(kind).fields:  # pyright: ignore[reportAttributeAccessIssue]
            if field.name == "rest":
                continue
            assert isinstance(field.type, msgspec.inspect.Metadata), f"{kind.__name__}.{field.name}"
            assert field.type.extra is not None and "unit" in field.type.extra
            extra = field.type.extra_json_schema or {}
            assert extra.get("description") or field.type.extra["unit"], f"{kind.__name__}.{field.name}"


def test_a_plain_value_is_what_it_was() -> None:
    for value in (1, 1.5, "a", None, True, [1, [2.5]], {"a": [0.5]}):
        assert plain_value(value) == value


def test_the_tables_of_the_documentation_are_made_of_the_classes() -> None:
    found = record_tables.pages()
    assert {path.name for path in found} == {"metrics.md", "health.md"}
    for path, text in found.items():
        assert path.read_text(encoding="utf-8") == text, "python tests/support/record_tables.py --write"
    assert sum(len(record_tables.BLOCK.findall(text)) for text in found.values()) == len(record_tables.TABLES)
