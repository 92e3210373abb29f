"""Alerts of a run as state: raised, taken back, and gone with the attempt they were of."""

from typing import Any

import pytest
from read_records import reduce, reduce_all, typed

from xtrain.tui.state import RunState


def alert(kind: str, state: str = "raised", **given: Any) -> dict[str, Any]:
    fields = {"value": 2.0, "limit": 1.0, "ranks": [], "message": f"{kind} is high", "step": 5, "time": 10.0}
    return {"event": "alert", "kind": kind, "state": state, **fields, **given}


def kinds(*records: dict[str, Any]) -> list[str]:
    return [each.kind for each in reduce_all(RunState(), records).raised]


def test_what_is_raised_is_there_until_it_is_cleared():
    assert kinds(alert("disk"), alert("slow")) == ["disk", "slow"]
    assert kinds(alert("disk"), alert("slow"), alert("disk", "cleared")) == ["slow"]
    assert kinds(alert("disk", "cleared")) == []


def test_of_a_kind_the_latest_counts():
    state = reduce_all(RunState(), [alert("disk", step=1), alert("slow"), alert("disk", step=9)])
    assert [(each.kind, each.step) for each in state.raised] == [("slow", 5), ("disk", 9)]


def test_another_attempt_begins_with_none():
    state = reduce(RunState(), alert("disk"))
    assert reduce(state, {"event": "run_start", "attempt": 2}).raised == ()


def test_it_is_kept_among_what_happened_between_steps():
    assert reduce(RunState(), alert("disk")).ticks == (typed(alert("disk")),)


@pytest.mark.parametrize(
    "record",
    [{"event": "alert"}, alert("disk", value="nan", limit=None, ranks=None, step="x", time=[]),
        alert("stalled", ranks=[1, "two", float("inf"), 3.0]),
        {"event": "alert", "kind": 3, "state": 7, "message": None}],
)  # fmt: skip
def test_a_record_of_another_version_is_no_failure(record):
    (found,) = reduce(RunState(), record).raised
    assert found.kind in ("", "disk", "stalled") and all(isinstance(rank, int) for rank in found.ranks)
