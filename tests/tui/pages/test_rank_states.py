"""Which ranks are named, and how."""

from typing import Any

import pytest
from attrs import evolve
from made_boards import a_beat, a_board, a_rank, entries, small_plan, some_ranks, started

from xtrain.tui.model.board import Board
from xtrain.tui.model.life import Life, Ranks
from xtrain.tui.pages.node_times import step_times
from xtrain.tui.pages.rank_figures import FINE, GONE, SILENT, SLOW, STUCK, UNKNOWN, common, listed, sentences, states

PLAN = small_plan({"pp": 1, "fsdp": 4})


def board(*, events: tuple[Any, ...] = (), **own: Any) -> Board:
    fields = {name: own.pop(name) for name in ("life", "records") if name in own}
    return a_board(PLAN, ranks=some_ranks(PLAN, **own), events=entries(*events), **fields)


def said(found: Board) -> list[tuple[str, int]]:
    times = step_times((each.rank, each.node_seconds) for each in found.ranks)
    return sentences(found, states(found), times)


def test_ranks_that_get_on_are_no_matter() -> None:
    assert states(board()).of.tolist() == [FINE] * 4
    assert states(board()).troubled() == []
    assert said(board()) == [("all ranks make progress, and none is slower than the others", FINE)]


def test_lines_that_take_long_to_read_are_said_to_be_old() -> None:
    found = evolve(board(), ranks=evolve(some_ranks(PLAN), seconds_old=64.0))
    assert said(found)[1] == ("heartbeats are up to 1m04s old: it takes that long to read them all", FINE)


@pytest.mark.parametrize(
    ("pulse", "state", "words"),
    [("gone", GONE, "rank 2 is gone, last seen in step.forward_backward (fsdp 2, host host0)"),
        ("idle", STUCK, "rank 2 makes no progress for 40 s in step.forward_backward (fsdp 2, host host0)"),
        ("silent", SILENT,
            "rank 2 has sent no heartbeat for 39 s, last seen in step.forward_backward (fsdp 2, host host0)")],
)  # fmt: skip
def test_a_rank_that_something_is_wrong_with_is_named(pulse: str, state: int, words: str) -> None:
    found = board(pulse={2: pulse}, beat={2: a_beat(2, host="host0", idle=1.0)}, seconds_silent={2: 39.0})
    assert states(found).of.tolist() == [FINE, FINE, state, FINE]
    assert said(found) == [(words, state)]


def test_a_rank_that_has_never_reported_anything() -> None:
    found = board(pulse={1: "unknown"}, last={1: None}, beat={1: None})
    assert states(found).of[1] == UNKNOWN
    assert states(found).troubled() == []


def test_who_is_slow_is_said_with_how_much_and_where() -> None:
    nodes = {"step.fetch": 0.1, "step.forward_backward": 0.55, "step.optimizer": 0.05}
    found = board(busy_seconds={3: 0.66}, node_seconds={3: nodes})
    assert states(found).of.tolist() == [FINE, FINE, FINE, SLOW]
    assert said(found) == [
        (
            "rank 3 works 50% longer than the others: 660 ms of a step against 440 ms, 200 ms more in "
            "step.forward_backward (fsdp 3, host host0)",
            SLOW,
        )
    ]


def test_no_node_is_named_where_none_holds_the_difference() -> None:
    (words, _) = said(board(busy_seconds={3: 0.66}))[0]
    assert words == "rank 3 works 50% longer than the others: 660 ms of a step against 440 ms (fsdp 3, host host0)"


STUCK_EVENT = {
    "event": "stuck", "ranks": [1], "state": "stuck", "node": "step.clip", "place": "torch/x.py:12 wait",
    "last_node": "", "seconds": 61.0, "step": 41,
}  # fmt: skip


@pytest.mark.parametrize(
    ("state", "of", "words"),
    [("stuck", STUCK, "is stuck"), ("frozen", STUCK, "is frozen"), ("ended", GONE, "has ended")],
)
def test_whom_the_run_has_blamed(state: str, of: int, words: str) -> None:
    found = board(events=(started(), {**STUCK_EVENT, "state": state}))
    assert states(found).of[1] == of
    assert said(found)[0] == (
        f"rank 1 {words} for 1m01s in step.clip at torch/x.py:12 wait (fsdp 1, host host0)",
        of,
    )


def test_blame_of_an_earlier_start_is_past() -> None:
    assert states(board(events=(started(), STUCK_EVENT, started(attempt=2)))).of.tolist() == [FINE] * 4


def test_a_rank_that_has_failed_says_why() -> None:
    failure = {"event": "failure", "rank": 2, "error": "RuntimeError: boom\nmore", "step": 40, "time": 1.0}
    echo = {"event": "failure", "rank": 1, "error": "lost", "lost": True, "step": 40, "time": 1.1}
    found = board(records=[started(), failure, echo], life=Life(state="ended", status="failed"))
    assert states(found).of.tolist() == [FINE, FINE, GONE, FINE]
    assert said(found)[0] == ("rank 2 failed: RuntimeError: boom (fsdp 2, host host0)", GONE)


def test_of_a_run_that_has_ended_well_nobody_is_missed() -> None:
    found = board(pulse=dict.fromkeys(range(4), "gone"), life=Life(state="ended", status="done"))
    assert states(found).of.tolist() == [FINE] * 4
    assert said(found) == [("the run has ended: done", FINE)]


def test_of_a_run_that_is_lost_all_are() -> None:
    found = board(pulse=dict.fromkeys(range(4), "gone"), life=Life(state="lost"))
    assert states(found).of.tolist() == [GONE] * 4
    assert said(found) == [("4 ranks are gone: 0–3", GONE)]


def test_the_worst_are_named_first() -> None:
    found = board(pulse={0: "silent", 3: "gone"}, busy_seconds={1: 0.9})
    assert [state for _, state in said(found)] == [GONE, SILENT, SLOW]
    assert states(found).troubled() == [3, 0, 1]


def test_before_anything_is_known() -> None:
    nothing = dict.fromkeys(range(4))
    silent = board(beat=nothing, step_seconds=nothing, last=nothing)
    assert said(silent) == [("no rank has sent a heartbeat yet", FINE)]
    starting = board(step_seconds=dict.fromkeys(range(4), None))
    assert said(starting) == [("all ranks make progress; no step has been logged yet", FINE)]


def test_what_many_ranks_have_in_common() -> None:
    plan = small_plan({"pp": 2, "fsdp": 16})
    ranks = tuple(some_ranks(plan))
    assert common(ranks, [8, 9, 15]) == ", all on host host1"
    assert common(ranks, [16, 31]) == ", all with pp 1"
    assert common(ranks, [0, 31]) == ""


def test_numbers_are_listed_in_ranges() -> None:
    assert listed([3, 1, 2, 7, 9, 10]) == "1–3, 7, 9–10"
    assert listed(range(0, 20, 2)) == "0, 2, 4, 6, 8, 10 and 4 more"
    assert listed([1000]) == "1,000"


def test_ranks_without_a_plan_are_named_by_number() -> None:
    found = a_board(None, ranks=Ranks(world_size=2, all=(a_rank(0), a_rank(1, pulse="gone"))))
    assert said(found) == [("rank 1 is gone, last seen in step.forward_backward (host host0)", GONE)]
