"""The logged steps as columns, beside what dictionaries say of the same records."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrain.records.lines import line_of
from xtrain.tui.model import series as module
from xtrain.tui.model.series import Series

Record = dict[str, Any]
KEYS = ("loss", "tokens", "lr", "eval/web/loss", "moe/load/0", "phase", "loss/web")


def _record(draw: st.DrawFn, step: int, time: float) -> Record:
    record: Record = {"step": step, "time": time}
    for key in draw(st.lists(st.sampled_from(KEYS), unique=True)):
        if key == "moe/load/0":
            record[key] = [0.5, 0.5]
        elif key == "phase":
            record[key] = draw(st.sampled_from(["train", "anneal"]))
        else:
            numbers = st.floats(-1e6, 1e6) | st.integers(-(2**60), 2**60) | st.sampled_from(["nan", "inf", None])
            record[key] = draw(numbers)
    return record


@st.composite
def streams(draw: st.DrawFn, kinds: str = "nnnnnnesbl") -> list[Record]:
    """Steps that grow, stand still for an evaluation, go back now and then, or come late."""
    found: list[Record] = []
    step, time = 0, 1000.0
    for kind in draw(st.lists(st.sampled_from(kinds), max_size=60)):
        time += 1
        if kind == "b" and step:  # the run has gone back
            step = draw(st.integers(0, step))
        if kind in "nb":
            step += draw(st.integers(1, 3))
        if kind == "l" and step > 1:  # late: another process has written it before
            found.append(_record(draw, draw(st.integers(1, step)), 1.0))
            continue
        if kind == "e":
            found.append({"step": step, "time": time, "eval/web/loss": float(time)})
            continue
        found.append(_record(draw, step, time))
    return found


def _number(value: Any) -> float:
    if isinstance(value, bool) or not (isinstance(value, int | float) or value in ("nan", "inf", "-inf")):
        return math.nan
    return float(value)


def _is_evaluation(record: Record) -> bool:
    return all(key in ("step", "time") or key.startswith("eval/") for key in record)


def naive(records: list[Record]) -> dict[int, dict[str, float]]:
    """The finite numbers of each step, one record after the other."""
    rows: dict[int, dict[str, float]] = {}
    last: Record = {}
    for record in records:
        step = record["step"]
        newest = max(rows, default=-1)
        late = step < newest and record["time"] < (last.get("time") or 0.0)
        if step < newest and not late:
            rows = {at: row for at, row in rows.items() if at < step}
            last = last if last.get("step", -1) < step else {}
        row = rows.setdefault(step, {})
        for key, value in record.items():
            number = _number(value)
            if key != "step" and math.isfinite(number) and not (late and key in row):
                row[key] = number
        if not late and step >= last.get("step", -1):
            if step == last.get("step"):
                last = {**last, **record}
            elif not _is_evaluation(record):
                last = record
    return rows


def _same(series: Series, rows: dict[int, dict[str, float]]) -> None:
    assert len(series) == len(rows)
    for key in ("time", "loss", "tokens", "lr", "eval/web/loss", "loss/web", "moe/load/0", "phase", "nothing"):
        expected = [(step, rows[step][key]) for step in sorted(rows) if key in rows[step]]
        x, y = series.xy(key)
        assert list(zip(x.tolist(), y.tolist(), strict=True)) == expected, key
        assert series.latest(key) == (expected[-1][1] if expected else None), key


def _fed(records: list[Record], cuts: list[int], **options: Any) -> Series:
    series = Series(**options)
    for begin, end in zip([0, *cuts], [*cuts, len(records)], strict=True):
        series.extend(records[begin:end])
    return series


@settings(max_examples=80, deadline=None)
@given(streams(), st.lists(st.integers(0, 60), max_size=6))
def test_columns_hold_what_the_records_say_however_they_come_in(records: list[Record], cuts: list[int]) -> None:
    cuts = sorted(min(cut, len(records)) for cut in cuts)
    _same(_fed(records, cuts), naive(records))
    whole, one_by_one = _fed(records, cuts), _fed(records, list(range(len(records))))
    assert line_of(whole.last) == line_of(one_by_one.last)


@settings(max_examples=60, deadline=None)
@given(streams(kinds="nnne"), st.lists(st.integers(0, 60), max_size=6))
def test_columns_that_are_read_again_hold_the_same(records: list[Record], cuts: list[int]) -> None:
    """Chunk by chunk, wherever the file was cut: an evaluation may lie in another chunk than the record of its step."""
    bounds = [0, *sorted({min(cut, len(records)) for cut in cuts}), len(records)]
    series, rows = Series(), [0]
    for begin, end in pairwise(bounds):
        series.extend(records[begin:end])
        rows.append(len(series))
    for key in series._columns.copy():
        del series._columns[key]
        series._gone.add(key)
        series.xy(key)
    for (begin, end), (first, upto) in zip(pairwise(bounds), pairwise(rows), strict=True):
        series.complete(first, records[begin:end], (*KEYS, "time"), upto)
    _same(series, naive(records))


def _logged(count: int, first: int = 1) -> list[Record]:
    return [
        {"step": step, "time": 1000.0 + step, "loss": 1 / step, "tokens": 1024 * step, "phase": "train"}
        for step in range(first, first + count)
    ]


def test_what_was_drawn_does_not_change_when_the_run_goes_back() -> None:
    series = Series()
    series.extend(_logged(1000))
    x, y = series.xy("loss")
    y_before = y.copy()
    series.extend([{"step": 500, "time": 9000.0, "loss": 77.0}])
    assert np.array_equal(y, y_before) and len(x) == 1000
    assert len(series) == 500 and series.latest("loss") == 77.0 and series.last.loss == 77.0
    series.extend(_logged(700, 501))
    assert np.array_equal(y, y_before)
    assert series.xy("loss")[1][499] == 77.0 and len(series) == 1200


def test_the_last_record_is_the_one_of_a_step_with_its_evaluations() -> None:
    series = Series()
    series.extend([*_logged(3), {"step": 3, "time": 1004.0, "eval/web/loss": 2.5}])
    assert series.last.phase == "train" and series.last.rest["eval/web/loss"] == 2.5
    series.extend([{"step": 4, "time": 1005.0, "eval/web/loss": 2.25}])
    assert series.last.step == 3, "an evaluation in a step that was not logged is no record of a step"
    assert series.latest("eval/web/loss") == 2.25
    assert series.keys == ("loss", "tokens", "eval/web/loss")


def test_numbers_are_those_of_the_file() -> None:
    value, large = 1.3476035594940186, 2**53
    series = Series()
    series.extend([{"step": 1, "time": 5.0, "loss": value, "tokens": large}])
    assert series.xy("loss")[1].tolist() == [value] and series.latest("tokens") == large
    assert series.last.tokens == large and type(series.last.tokens) is int


def test_other_axes_than_steps() -> None:
    series = Series()
    series.extend([*_logged(10), {"step": 5, "time": 900.0, "eval/web/loss": 3.0}])
    x, y = series.xy("loss", "tokens")
    assert x.tolist() == [1024.0 * step for step in range(1, 11)] and len(y) == 10
    assert series.xy("loss", "time")[0].tolist() == [1000.0 + step for step in range(1, 11)]
    assert series.xy("eval/web/loss", "tokens")[0].tolist() == [5 * 1024.0]
    series.extend([{"step": 11, "time": 500.0, "loss": 1.0}, {"step": 12, "time": 2000.0, "eval/web/loss": 3.0}])
    assert (np.diff(series.xy("loss", "time")[0]) >= 0).all(), "a clock that was set back does not turn a curve around"
    assert series.xy("eval/web/loss", "tokens")[0].tolist()[-1] == 10 * 1024.0, "no tokens are known behind the last"


def test_of_a_long_run_only_what_is_looked_at_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    count = 20_000
    records = [{**record, **{f"k{i}": record["step"] + i for i in range(20)}} for record in _logged(count)]
    series = Series(limit_bytes=8 * count * 6)
    for begin in range(0, count, 1000):
        series.xy("loss")
        series.extend(records[begin : begin + 1000])
    assert series._num_bytes() <= 8 * count * 7
    assert len(series.xy("loss")[0]) == count
    gone = [key for key in series.keys if key[0] == "k" and len(series.xy(key)[0]) < count]
    assert gone and series.latest(gone[0]) is not None
    key = gone[0]
    x, y = series.xy(key)
    assert len(x) >= 1000 and x[-1] == count and np.array_equal(y, x + int(key[1:])), "a sketch holds points of the run"

    clock[0] += 100.0  # nobody looks any more
    series.xy(key)
    wanted = series.wanting()
    assert wanted is not None and wanted[1] == (key,)
    for begin in range(0, count, 5000):
        rows, keys = series.wanting() or (0, ())
        assert rows == begin and keys == (key,)
        series.complete(begin, records[begin : begin + 5000], keys, begin + 5000)
    assert series.wanting() is None
    x, y = series.xy(key)
    assert len(x) == count and np.array_equal(y, x + int(key[1:]))
    series.extend([{**records[-1], "step": count + 1, key: 5}])
    assert series.xy(key)[1][-1] == 5 and len(series.xy(key)[0]) == count + 1
    assert series._num_bytes() <= 8 * count * 7


def test_what_does_not_fit_is_a_sketch_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifty curves at once that would need five times the memory: they are drawn, and nothing goes round in circles."""
    monkeypatch.setattr(module.time, "monotonic", lambda: 0.0)
    count = 10_000
    names = [f"loss/{i}" for i in range(50)]
    records = [{"step": step, "time": float(step), **dict.fromkeys(names, step)} for step in range(1, count + 1)]
    series = Series(limit_bytes=8 * count * 10)
    series.extend(records)
    series.xy("x")
    for _ in range(3):
        for name in names:
            assert len(series.xy(name)[0]) > 500
        while wanted := series.wanting():
            series.complete(wanted[0], records[wanted[0] :], wanted[1], count)
    assert sum(len(series.xy(name)[0]) == count for name in names) >= 5
    assert series._num_bytes() <= 8 * count * 11
    series.extend([{**records[-501], "time": count + 1.0}])  # the run has gone back
    for name in names:
        x, y = series.xy(name)
        assert x[-1] == count - 500 and np.array_equal(x, y), name


@pytest.mark.slow
def test_a_million_records_are_small() -> None:
    block = _logged(10_000)
    series = Series()
    for begin in range(0, 1_000_000, 10_000):
        for place, record in enumerate(block):
            record["step"] = begin + place + 1
        series.extend(block)
    x, y = series.xy("loss")
    assert len(series) == len(y) == 1_000_000 and x[0] == 1 and x[-1] == 1_000_000
    assert series._num_bytes() < 40e6
