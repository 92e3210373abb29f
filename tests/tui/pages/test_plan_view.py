"""The Plan screen as text, at every size, and what its keys do."""

from typing import Any

import pytest
from made_boards import a_beat, a_board, entries, small_plan, some_ranks, started

from xtrain.records.lines import read
from xtrain.records.metrics import StepMetrics
from xtrain.tui.board.app import in_ascii
from xtrain.tui.model.board import Board
from xtrain.tui.model.life import Life
from xtrain.tui.model.planned import Planned, planned
from xtrain.tui.model.series import Series
from xtrain.tui.pages.plan_rows import PlanFactRows, PlanFacts, percent
from xtrain.tui.pages.plan_view import (
    PlanPage,
    PlanView,
    breakdown_rows,
    entered,
    fold,
    followed,
    moved,
    page,
    to_node,
    to_section,
)
from xtrain.tui.pages.sheet import cells, plain

SIZES = [(200, 46), (120, 36), (80, 20), (60, 16), (40, 8)]
TIMES = {"computing": 0.3, "exposed": 0.05, "step": 0.4, "fast": 0.35, "slow": 0.45, "mfu": 0.4}
SETUP = [
    started(),
    {"event": "setup_begin", "node": "setup.bootstrap", "time": 1.0, "step": 0},
    {"event": "setup", "node": "setup.bootstrap", "time": 2.0, "step": 0, "seconds": 0.75, "detail": ""},
]
DONE = {"event": "setup_done", "time": 9.0, "step": 0, "seconds": 9.0}


def steps(*numbers: int) -> list[dict[str, Any]]:
    return [{"step": step, "time": 10.0 + step, "loss": 3.0, "step_seconds": 1.0} for step in numbers]


TRAINING = (*SETUP, DONE, *steps(40, 41))


class SeriesOfOneRecord(Series):
    """What the newest record says."""

    def __init__(self, **last: Any) -> None:
        super().__init__()
        self._record = last

    @property
    def last(self) -> StepMetrics:
        return read(StepMetrics, self._record)


def a_run(plan: Planned | None = None, *, records: Any = TRAINING, **fields: Any) -> Board:
    plan = plan or small_plan(estimates={"tokens_per_step": 1000, "classes": [], "times": TIMES})
    values: dict[str, Any] = {
        "ranks": some_ranks(plan, node_seconds={1: {"step.fetch": 0.15, "step.forward_backward": 0.4}}),
        "events": entries({"event": "eval", "node": "tick.eval.web", "seconds": 1.23, "step": 40}),
        "series": SeriesOfOneRecord(step_seconds=0.5, data_seconds=0.01, comm_seconds=0.06),
    }
    return a_board(plan, records=records, **values | fields)


def facts(plan: Planned | None = None, **fields: Any) -> PlanFacts:
    found = PlanFactRows().of(a_run(plan, **fields))
    assert found is not None
    return found


def text(drawn: PlanPage) -> str:
    return "\n".join(plain(each) for each in drawn.rows)


def line(drawn: PlanPage, node: str) -> str:
    """The row of a node in the list."""
    return next(
        plain(each)[: drawn.list_width] for each in drawn.rows if plain(each)[2:].lstrip("✓▶* ").startswith(node + " ")
    )


def many_nodes(number: int) -> Planned:
    plan = small_plan()
    graph = {
        "nodes": [
            {"id": f"setup.data.part{place:04d}", "kind": "setup", "op": "setup.data", "does": f"data {place}"}
            for place in range(number)
        ],
        "edges": [],
    }
    found = planned({**plan.content, "graph": graph})
    assert found is not None
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shows", ["list", "node", "time"])
def test_every_row_fits_the_screen(size: tuple[int, int], shows: Any) -> None:
    for known in (facts(), facts(many_nodes(2000)), facts(many_nodes(0)), facts(ranks=some_ranks(small_plan()))):
        for view in (PlanView(shows=shows), PlanView(shows=shows, query="eval", timing=True)):
            drawn = page(known, view, *size)
            assert len(drawn.rows) == size[1]
            assert {cells(each) for each in drawn.rows} == {size[0]}
            assert in_ascii(text(drawn)).count("?") == text(drawn).count("?")  # every sign has a plain one


@pytest.mark.parametrize("width", [200, 120, 80, 60])
def test_times_stand_beside_the_nodes_as_they_were_reported(width: int) -> None:
    drawn = page(facts(), PlanView(cursor="step.fetch"), width, 46)
    assert "750 ms" in line(drawn, "setup.bootstrap") and "✓" in line(drawn, "setup.bootstrap")
    fetch = line(drawn, "step.fetch")
    assert "150 ms" in fetch  # of the slowest rank
    assert ("125 ms" in fetch) == (width >= 80)  # of the median one
    shares = {"step.fetch": 0.125, "step.forward_backward": 0.375, "step.optimizer": 0.05}
    for node, mean in shares.items():
        assert percent(mean / sum(shares.values())) in line(drawn, node)


def test_the_node_under_way_is_marked_and_named() -> None:
    ranks = some_ranks(small_plan(), beat={1: a_beat(1, node="step.fetch")})
    drawn = page(facts(ranks=ranks), PlanView(cursor="step.fetch"), 120, 46)
    assert line(drawn, "step.fetch")[1] == "▶"
    assert line(drawn, "step.forward_backward")[1] == "▶"
    assert line(drawn, "step.optimizer")[1] == " "
    assert "now in step.forward_backward on 1 of 2 ranks" in text(drawn)
    assert "under way on 1 of 2 ranks" in text(drawn)


def test_of_a_run_that_is_over_nothing_is_under_way() -> None:
    drawn = page(facts(life=Life(state="ended", status="done")), PlanView(), 120, 46)
    assert "▶" not in text(drawn)


def test_during_set_up_the_node_under_way_says_how_long_it_has_been() -> None:
    begun = {"event": "setup_begin", "node": "setup.loader", "time": 88.0, "step": 0}
    drawn = page(facts(records=[*SETUP, begun]), PlanView(), 120, 46)
    assert "12s…" in line(drawn, "setup.loader") and line(drawn, "setup.loader")[1] == "▶"


def test_ticks_say_when_they_come_next_and_how_long_they_took() -> None:
    drawn = page(facts(), PlanView(cursor="tick.log"), 200, 46)
    assert "step 45, in 4s (every 5 steps)" in text(drawn)
    evaluation = line(drawn, "tick.eval.web")
    assert "1.23 s" in evaluation and "step 80, in 39s" in evaluation
    narrow = page(facts(), PlanView(cursor="tick.log"), 60, 46)
    assert "80, in 39s" in line(narrow, "tick.eval.web")


def test_a_tick_that_does_not_come_again_says_so() -> None:
    drawn = page(facts(records=[*SETUP, DONE, *steps(99, 100)]), PlanView(), 200, 46)
    assert "not again (every 40 steps)" in line(drawn, "tick.eval.web")


def test_events_and_commands_say_what_they_wait_for() -> None:
    drawn = page(facts(), PlanView(), 200, 46)
    assert "on sigterm" in line(drawn, "event.sigterm.checkpoint")
    assert "asked: stop, asked: save" in line(drawn, "event.control.checkpoint")


def test_a_node_in_full() -> None:
    shown = text(page(facts(), PlanView(cursor="tick.checkpoint", shows="node"), 80, 40))
    assert "due      step 80, in 39s (every 40 steps); every 40 steps, 2 times, every 10 min" in shown.replace(
        "\n         ", " "
    )
    shown = text(page(facts(), PlanView(cursor="setup.loader", shows="node"), 80, 40))
    assert "after    collate.pack: microbatches" in shown and "before   step.fetch: rows" in shown
    shown = text(page(facts(), PlanView(cursor="event.sigterm.checkpoint", shows="node"), 80, 40))
    assert "op       tick.checkpoint" in shown and "when     on sigterm" in shown
    shown = text(page(facts(), PlanView(cursor="setup.bootstrap", shows="node"), 80, 40))
    assert "axes     fsdp 2" in shown and "seed = 7" in shown and "took     750 ms" in shown


def test_planned_traffic_of_a_node() -> None:
    traffic = {"axis": "fsdp", "op": "all_gather", "node": "step.fetch", "count": 12, "bytes": 2048,
               "exposed": True, "seconds": 0.002}  # fmt: skip
    classes = [{"pp": 0, "ranks": 2, "memory": {}, "traffic": [traffic]}]
    plan = small_plan(estimates={"tokens_per_step": 1000, "classes": classes, "times": None})
    shown = text(page(facts(plan), PlanView(cursor="step.fetch", shows="node"), 80, 40))
    assert "planned  12 all_gather over fsdp, 2.0 KiB, 2 ms, exposed" in shown


def test_where_the_time_goes_is_sorted_and_compared_with_the_plan() -> None:
    rows = [plain(each) for each in breakdown_rows(facts(), 80, 30)]
    assert rows[1].strip() == "500 ms a step, 25% longer (planned 400 ms, 350 ms to 450 ms)"
    assert rows[2].strip() == "planned: computing 300 ms, exposed communication 50 ms"
    assert [row.split()[0] for row in rows[3:6]] == ["step.forward_backward", "step.fetch", "step.optimizer"]
    assert rows[3].split()[1:4] == ["375", "ms", "68.2%"]
    assert rows[7].split()[:5] == ["data", "wait", "10", "ms", "2.0%"]
    assert rows[8].split()[:4] == ["communication", "60", "ms", "12.0%"]


def test_what_has_no_room_is_added_up() -> None:
    rows = [plain(each) for each in breakdown_rows(facts(), 80, 8)]
    assert len(rows) == 8 and rows[4].startswith("2 more nodes") and rows[4].split()[3:6] == ["175", "ms", "31.8%"]


def test_without_times_the_plan_says_why() -> None:
    rows = [plain(each) for each in breakdown_rows(facts(small_plan()), 80, 30)]
    assert "no planned time: the cluster is unknown" in rows[1]
    none = some_ranks(small_plan(), node_seconds={0: {}, 1: {}})
    empty = facts(small_plan(), series=SeriesOfOneRecord(), ranks=none)
    assert "no step has been logged yet" in plain(breakdown_rows(empty, 80, 30)[1])


def test_what_is_there_is_not_shown_as_nothing() -> None:
    assert [percent(share) for share in (0.0, 0.0001, 0.5, 0.99999)] == ["0.0%", "<0.1%", "50.0%", "100%"]


def test_the_cursor_goes_over_the_lines_and_the_list_follows_it() -> None:
    known = facts(many_nodes(2000))
    first = page(known, PlanView(), 80, 20)
    assert first.view.cursor == "setup.data.part0000"
    far = page(known, moved(first, 1500), 80, 20)
    assert far.view.cursor == "setup.data.part1500" and far.view.top > 1400
    assert "setup.data.part1500" in text(far)
    assert page(known, moved(far, 10_000), 80, 20).view.cursor == "setup.data.part1999"
    assert page(known, moved(far, -10_000), 80, 20).view.cursor == "#setup"


def test_from_section_to_section() -> None:
    known = facts()
    drawn = page(known, PlanView(cursor="setup.bootstrap"), 80, 20)
    seen = []
    for _ in range(6):
        drawn = page(known, to_section(drawn, 1), 80, 20)
        seen.append(drawn.view.cursor)
    assert seen == ["#collate", "#step", "#tick", "#event", "#shutdown", "shutdown.leave"]
    assert to_section(drawn, -1).cursor == "#shutdown"


def test_sections_fold_and_open() -> None:
    known = facts()
    drawn = page(known, PlanView(cursor="step.fetch"), 80, 30)
    folded = page(known, fold(drawn, folded=True), 80, 30)
    assert folded.view.cursor == "#step" and "▸ Step  3" in text(folded) and "step.optimizer" not in text(folded)
    opened = page(known, entered(folded), 80, 30)
    assert "step.optimizer" in text(opened) and "▾ Step  3" in text(opened)
    assert page(known, fold(folded, folded=False), 80, 30).view.folded == frozenset()


def test_a_search_keeps_what_it_finds_and_says_how_many() -> None:
    drawn = page(facts(), PlanView(cursor="step.fetch", query="checkpoint"), 120, 36)
    assert "3 of 12 nodes have “checkpoint”" in text(drawn)
    assert drawn.view.cursor == "tick.checkpoint"
    nothing = page(facts(), PlanView(query="zzz"), 80, 20)
    assert "no node has “zzz”" in text(nothing)
    assert moved(nothing, 1) == nothing.view and entered(nothing) is not None


def test_enter_opens_a_node_and_closes_it() -> None:
    drawn = page(facts(), PlanView(cursor="step.fetch"), 60, 16)
    full = page(facts(), entered(drawn), 60, 16)
    assert full.view.shows == "node" and text(full).startswith("step.fetch ")
    assert entered(full).shows == "list"


def test_a_long_node_can_be_scrolled_to_its_end() -> None:
    drawn = page(facts(), PlanView(cursor="setup.bootstrap", shows="node"), 30, 5)
    assert drawn.most_scroll > 0 and "more below" in text(drawn)
    assert "seed = 7" in text(page(facts(), moved(drawn, 99), 30, 5))


def test_to_the_node_under_way_whatever_is_folded_or_searched() -> None:
    view = PlanView(folded=frozenset({"step", "tick"}), query="eval", cursor="tick.eval.web")
    found = followed(view, facts())
    assert (found.cursor, found.query, found.folded) == ("step.forward_backward", "", frozenset({"tick"}))
    assert to_node(view, facts(), "no.such.node") == view
    over = facts(life=Life(state="ended", status="done"))
    assert followed(view, over) == view


def test_there_are_no_facts_before_there_is_a_plan() -> None:
    assert PlanFactRows().of(a_board(None)) is None


def test_a_wide_screen_shows_list_node_and_breakdown_at_once() -> None:
    shown = text(page(facts(), PlanView(cursor="step.fetch"), 200, 46))
    assert "step.optimizer" in shown and "take rows" in shown and "step time by node" in shown
    stacked = page(facts(), PlanView(cursor="step.fetch"), 80, 20)
    assert stacked.beside and "step time by node" not in text(stacked)
    assert "step time by node" in text(page(facts(), PlanView(cursor="step.fetch", timing=True), 80, 20))


def test_of_one_rank_there_is_no_median() -> None:
    plan = small_plan({"fsdp": 1})
    drawn = page(facts(plan, ranks=some_ranks(plan)), PlanView(cursor="step.fetch"), 80, 30)
    assert "median" not in text(drawn) and "takes share" in text(drawn).replace("   ", "")
    assert line(drawn, "step.fetch").split("step.fetch")[1].split()[:3] == ["100", "ms", "20.0%"]
