"""The Ranks screen as text, at every size, and what its keys do."""

from typing import Any

import numpy as np
import pytest
from attrs import evolve
from made_boards import a_beat, a_board, small_plan, some_ranks, started

from xtrain.records.lines import read
from xtrain.records.metrics import RankMetrics
from xtrain.tui.board.app import in_ascii
from xtrain.tui.model.life import Life
from xtrain.tui.model.planned import Planned
from xtrain.tui.pages.rank_figures import (
    COMMUNICATION,
    DATA,
    FIGURES,
    MEMORY,
    PROGRESS,
    STEP,
    WORK,
    RankFactRows,
    RankFacts,
)
from xtrain.tui.pages.rank_view import (
    RankPage,
    RankView,
    at_cell,
    back,
    entered,
    moved,
    next_figure,
    page,
    reversed_order,
    sorted_by_next,
    table,
    to_trouble,
    to_worst,
)
from xtrain.tui.pages.rank_view import _memory_now as memory_now
from xtrain.tui.pages.sheet import cells, plain

SIZES = [(200, 46), (120, 36), (80, 20), (60, 16), (40, 8)]
SMALL = small_plan({"pp": 2, "fsdp": 4}, expert_axes={"pp": 2, "ep_replicate": 1, "ep_fsdp": 2, "ep": 2})
LARGE = small_plan({"pp": 8, "fsdp": 128, "ulysses": 4, "tp": 4})
MEMORY_OF = {
    "tokens_per_step": 1000,
    "classes": [{"pp": pp, "ranks": 4, "memory": {}, "traffic": []} for pp in range(2)],
    "times": None,
}


def facts(plan: Planned = SMALL, *, device: str = "cpu", **own: Any) -> RankFacts:
    found = RankFactRows().of(a_board(plan, ranks=some_ranks(plan, **own), records=[started(device=device)]))
    assert found is not None
    return found


def text(drawn: RankPage) -> str:
    return "\n".join(plain(each) for each in drawn.rows)


@pytest.fixture(scope="module")
def huge() -> RankFacts:
    return facts(LARGE, step_seconds={77: 0.9}, busy_seconds={77: 0.84}, pulse={16_000: "gone"})


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shows", ["map", "table", "rank"])
def test_every_row_fits_the_screen(size: tuple[int, int], shows: Any, huge: RankFacts) -> None:
    for known in (facts(pulse={3: "gone"}, busy_seconds={5: 0.9}), huge):
        for experts in (False, True):
            drawn = page(known, RankView(shows=shows, experts=experts), *size)
            assert len(drawn.rows) == size[1]
            assert {cells(each) for each in drawn.rows} == {size[0]}
            assert in_ascii(text(drawn)).count("?") == text(drawn).count("?")  # every sign has a plain one


@pytest.mark.parametrize("size", SIZES)
def test_the_map_shows_who_is_slow_and_who_is_gone_without_colours(size: tuple[int, int]) -> None:
    drawn = page(facts(step_seconds={5: 0.9}, pulse={3: "gone"}), RankView(), *size)
    grid = drawn.grid
    assert grid is not None and grid.most == 1
    body = [plain(each) for each in drawn.rows[drawn.first_row : drawn.first_row + grid.num_rows]]

    def sign(rank: int) -> str:
        row, column = divmod(int(grid.cell_of[rank]), grid.num_columns)
        return body[row][grid.label_width + 1 + column * grid.cell_width]

    assert sign(5) == "█" and sign(3) == "✗"
    assert len({sign(rank) for rank in (0, 1, 2, 4, 6, 7)}) == 1


def test_cells_with_room_show_values_as_they_were_reported() -> None:
    shown = text(page(facts(step_seconds={5: 0.9}), RankView(), 120, 36))
    assert "█ 900 ms" in shown and shown.count("500 ms") >= 7
    assert "most 900 ms on rank 5" in shown and "median 500 ms" in shown


def test_every_figure_is_explained_where_there_is_room() -> None:
    for place, figure in enumerate(FIGURES):
        shown = text(page(facts(), RankView(figure=place), 200, 46))
        assert figure.title in shown.splitlines()[0] and figure.says in shown


def test_the_legend_says_where_each_shade_begins() -> None:
    for rows in range(14, 40):
        drawn = page(facts(step_seconds={5: 0.9}), RankView(), 120, rows)
        assert "· under 540 ms  ░ 540 ms  ▒ 630 ms  ▓ 720 ms  █ 810 ms+" in text(drawn), rows


def test_a_cell_says_how_many_ranks_it_stands_for_and_shows_the_worst(huge: RankFacts) -> None:
    for size in SIZES[:-1]:
        drawn = page(huge, RankView(rank=77), *size)
        assert drawn.grid is not None and drawn.grid.most > 1
        assert f"each cell is the worst of {drawn.grid.most:,} ranks" in text(drawn)
        assert drawn.rank == 77
        gone = page(huge, RankView(rank=16_000), *size)
        assert gone.rank == 16_000


def test_what_every_figure_is_of() -> None:
    rank = facts(beat={0: a_beat(0, idle=3.0)}, seconds_silent={0: 4.0}).ranks[0]
    values = [figure.of(rank) for figure in FIGURES]
    assert values == [0.5, 0.44, 0.004, 0.06, 1000.0, 7.0]
    assert [figure.words(value) for figure, value in zip(FIGURES, values, strict=True) if value is not None] == [
        "500 ms", "440 ms", "4 ms", "60 ms", "1000 B", "7 s",
    ]  # fmt: skip


def planned_memory() -> Planned:
    plan = small_plan({"pp": 2, "fsdp": 4}, estimates=MEMORY_OF)
    content = dict(plan.content) | {
        "memory": {"per_rank": [{"pp": 0, "allocated_bytes": 2000}, {"pp": 1, "allocated_bytes": 500}]}
    }
    from xtrain.tui.model.planned import planned

    found = planned(content)
    assert found is not None
    return found


def test_memory_is_compared_with_the_plan_of_its_own_stage() -> None:
    known = facts(planned_memory(), device="cuda", memory_bytes={1: 1900.0})
    measured = known.figure(MEMORY)
    assert measured.against_plan
    assert measured.values.tolist() == [0.5, 0.95, 0.5, 0.5, 2.0, 2.0, 2.0, 2.0]
    drawn = page(known, RankView(figure=FIGURES.index(MEMORY), rank=4), 120, 36)
    assert "share of the planned" in text(drawn) and text(drawn).count("+ 200%") == 4
    assert "1000 B, 200% of the planned 500 B" in text(drawn)
    assert "+ over plan" in text(drawn)


def test_on_a_cpu_memory_is_not_compared_with_a_plan_that_counts_tensors() -> None:
    known = facts(planned_memory(), device="cpu")
    assert not known.figure(MEMORY).against_plan and known.figure(MEMORY).values[0] == 1000.0


def test_ages_have_levels_that_do_not_depend_on_the_others() -> None:
    known = facts(beat={1: a_beat(1, idle=700.0), 2: a_beat(2, idle=12.0)})
    measured = known.figure(PROGRESS)
    assert measured.scale.levels(measured.values)[:4].tolist() == [0, 9, 3, 0]


def test_little_waiting_is_not_painted_hot() -> None:
    known = facts(data_seconds={2: 0.008})
    assert known.figure(DATA).scale.levels(known.figure(DATA).values).max() <= 3
    assert known.figure(COMMUNICATION).scale.levels(known.figure(COMMUNICATION).values).max() == 9


def test_the_detail_holds_a_rank_against_the_median_one() -> None:
    nodes = {"step.fetch": 0.1, "step.forward_backward": 0.75, "step.optimizer": 0.05}
    known = facts(step_seconds={5: 0.9}, node_seconds={5: nodes}, beat={5: a_beat(5, pid=4242, place="x.py:3 f")})
    shown = text(page(known, RankView(rank=5), 120, 36))
    assert "pp 1 · fsdp 1 · (ep_fsdp 0, ep 1)" in shown
    assert "host host0 · process 4242" in shown
    assert "step 41, step.forward_backward" in shown
    assert "900 ms, median 500 ms, +80%" in shown
    assert "750 ms   350 ms  +114%" in shown.replace("  750", "750")
    assert "at x.py:3 f" in shown


def test_the_expert_view_lays_the_same_ranks_out_as_experts_see_them() -> None:
    known = facts()
    assert known.experts
    names = {part.name for part in page(known, RankView(experts=True), 120, 36).grid.columns}  # type: ignore[union-attr]
    assert names == {"ep_fsdp", "ep"}
    without = facts(small_plan({"fsdp": 4}, expert_axes={"pp": 1, "ep_replicate": 1, "ep_fsdp": 4, "ep": 1}))
    assert not page(without, RankView(experts=True), 120, 36).view.experts


def test_the_cursor_goes_over_cells_and_stays_on_the_map() -> None:
    drawn = page(facts(), RankView(), 120, 36)
    assert drawn.grid is not None and (drawn.grid.num_rows, drawn.grid.num_columns) == (2, 4)
    assert moved(drawn, 1, 1).rank == 5
    assert moved(drawn, -1, -1).rank == 0
    assert moved(drawn, 99, 99).rank == 7
    assert at_cell(drawn, 6).rank == 6


def test_the_cell_under_the_cursor_is_drawn_in_another_style() -> None:
    drawn = page(facts(), RankView(rank=6), 120, 36)
    grid = drawn.grid
    assert grid is not None
    cells_of = list(drawn.rows[drawn.first_row : drawn.first_row + grid.num_rows])
    chosen = [(y, x) for y, each in enumerate(cells_of) for x, (_, style) in enumerate(each) if "cursor" in style]
    assert chosen == [(1, 2 + 4), (1, 2 + 5)]  # sign and value of the third cell, behind the label and the gap


def test_few_ranks_have_their_table_below_the_map() -> None:
    shown = text(page(facts(step_seconds={5: 0.9}), RankView(rank=5), 120, 36))
    assert "under 540 ms" in shown and "own work" in shown
    assert any(line.startswith("›     5 slow") and "900 ms" in line for line in shown.splitlines())


def test_the_next_figure_is_one_that_ranks_have_reported() -> None:
    none = dict.fromkeys(range(8))
    known = facts(comm_seconds=none, data_seconds=none)
    view, seen = RankView(), []
    for _ in range(4):
        view = next_figure(page(known, view, 80, 20), 1)
        seen.append(FIGURES[view.figure])
    assert seen == [WORK, MEMORY, PROGRESS, STEP]
    assert FIGURES[next_figure(page(known, RankView(), 80, 20), -1).figure] is PROGRESS


def test_a_cell_of_many_opens_their_table_and_one_of_them_in_full(huge: RankFacts) -> None:
    drawn = page(huge, RankView(rank=77), 80, 20)
    view = entered(drawn)
    assert view.shows == "table" and 77 in view.only and len(view.only) <= drawn.grid.most  # type: ignore[union-attr]
    listed = page(huge, view, 80, 20)
    assert f"{len(view.only)} of 16,384 ranks" in text(listed) and listed.rank == 77
    full = page(huge, entered(listed), 80, 20)
    assert full.view.shows == "rank" and "rank 77" in text(full)
    assert back(full).shows == "table" and back(page(huge, back(full), 80, 20)).shows == "map"


def test_a_cell_of_one_opens_that_rank() -> None:
    view = entered(page(facts(), RankView(rank=3), 80, 20))
    assert (view.shows, view.rank, view.back) == ("rank", 3, "map")
    assert entered(page(facts(), view, 80, 20)).shows == "map"


def test_a_long_rank_can_be_scrolled_to_its_end() -> None:
    drawn = page(facts(), RankView(shows="rank", rank=3), 60, 8)
    assert drawn.most_scroll > 0 and "more below" in text(drawn)
    last = page(facts(), moved(drawn, 999, 0), 60, 8)
    assert last.view.scroll == drawn.most_scroll and "step.optimizer" in text(last)
    assert text(page(facts(), RankView(shows="rank", rank=3, scroll=999), 60, 8)) == text(last)  # it was longer before


def test_the_table_holds_numbers_as_they_were_reported() -> None:
    known = facts(step_seconds={5: 0.9}, pulse={3: "gone"})
    rows = text(page(known, RankView(shows="table"), 200, 46)).splitlines()
    head = next(line for line in rows if "rank▴" in line)
    assert head.split()[:6] == ["rank▴", "state", "place", "step", "own", "work"]
    own = next(line for line in rows if line.split()[0] == "5")
    for value in ("pp 1 fsdp 1", "900 ms", "840 ms", "4 ms", "60 ms", "1000 B", "41 forward_backward", "host0"):
        assert value in own
    assert any("✗ gone" in line and line.split()[0] == "3" for line in rows)


def test_of_a_run_that_has_ended_nobody_gets_on() -> None:
    board = a_board(SMALL, records=[started()], life=Life(state="ended", status="done"))
    known = RankFactRows().of(board)
    assert known is not None
    shown = text(page(known, RankView(shows="table"), 200, 46))
    assert "gets on" not in shown and shown.count(" ended ") == 8 and "0 s" not in shown
    assert "last     step 41" in text(page(known, RankView(), 120, 36))


@pytest.mark.parametrize("width", [200, 120, 80, 60, 40])
def test_the_table_keeps_what_matters_most(width: int) -> None:
    drawn = page(facts(), RankView(shows="table"), width, 20)
    head = plain(drawn.rows[drawn.first_row - 1]).split()
    assert {"rank▴", "state", "step"} <= set(head)


def test_the_table_is_sorted_by_its_columns_and_the_cursor_goes_to_the_top() -> None:
    known = facts(step_seconds={5: 0.9}, busy_seconds={2: 0.9}, memory_bytes={6: 5000.0}, pulse={3: "gone"})
    drawn = page(known, RankView(shows="table", rank=1), 200, 46)
    tops = []
    for _ in range(8):
        drawn = page(known, sorted_by_next(drawn), 200, 46)
        tops.append((drawn.view.sort, drawn.rank))
    assert tops[0] == ("state", 3) and ("step", 5) in tops and ("work", 2) in tops and ("memory", 6) in tops
    assert tops[-1] == ("rank", 0)
    other = page(known, reversed_order(drawn), 200, 46)
    assert other.order[0] == other.rank == 7


def test_ranks_without_a_number_come_last() -> None:
    known = facts(step_seconds={0: None, 5: 0.9})
    order = page(known, RankView(shows="table", sort="step", most_first=True), 80, 20).order
    assert order[0] == 5 and order[-1] == 0


def test_the_table_moves_by_lines_and_turns_into_the_map(huge: RankFacts) -> None:
    drawn = page(huge, RankView(shows="table"), 80, 20)
    far = page(huge, moved(drawn, 1000, 0), 80, 20)
    assert far.rank == 1000 and far.view.top > 0 and "1,000" in text(far)
    shown = page(huge, table(far), 80, 20)
    assert shown.view.shows == "map" and shown.grid is not None
    assert shown.grid.cell_of[shown.rank] == shown.grid.cell_of[1000]
    assert table(shown).shows == "table"


def test_to_the_worst_and_to_trouble() -> None:
    known = facts(step_seconds={5: 0.9}, busy_seconds={2: 0.9}, pulse={3: "gone"})
    assert to_worst(page(known, RankView(), 80, 20)).rank == 5
    seen, view = [], RankView()
    for _ in range(3):
        view = to_trouble(page(known, view, 80, 20))
        seen.append(view.rank)
    assert seen == [3, 2, 5]
    well = facts()
    assert to_trouble(page(well, RankView(rank=1), 80, 20)).rank == 1
    nothing = facts(step_seconds=dict.fromkeys(range(8)))
    assert to_worst(page(nothing, RankView(rank=4), 80, 20)).rank == 4


def test_a_world_that_has_become_smaller() -> None:
    view = evolve(page(facts(), RankView(rank=7), 80, 20).view, only=())
    smaller = facts(small_plan({"fsdp": 2}))
    assert page(smaller, view, 80, 20).view.rank == 1


def test_before_any_number_is_shown() -> None:
    none = dict.fromkeys(range(8))
    empty = {rank: {} for rank in range(8)}
    numbers = ("step", "step_seconds", "busy_seconds", "data_seconds", "comm_seconds", "memory_bytes", "beat")
    unknown = dict.fromkeys(range(8), "unknown")
    known = facts(last=none, node_seconds=empty, pulse=unknown, **dict.fromkeys(numbers, none))
    assert np.isnan(known.figure(STEP).values).all()
    for shows in ("map", "table", "rank"):
        for size in SIZES:
            assert len(page(known, RankView(shows=shows), *size).rows) == size[1]  # type: ignore[arg-type]
    assert next_figure(page(known, RankView(), 80, 20), 1) == RankView()


@pytest.mark.parametrize("width", [200, 120, 80, 60])
def test_of_few_ranks_cells_are_wide_and_name_them(width: int) -> None:
    few = facts(small_plan({"fsdp": 2}), step_seconds={1: 0.9})
    shown = text(page(few, RankView(), width, 20))
    assert "███ rank 1    900 ms" in shown and "··· rank 0    500 ms" in shown


@pytest.mark.parametrize(("line", "says"), [
    (None, []),
    ({}, []),
    ({"resident_bytes": 2**20}, ["1.0 MiB resident"]),
    ({"allocated_bytes": 2**31, "reserved_bytes": 2**32}, ["2.0 GiB allocated", "4.0 GiB reserved"]),
    ({"resident_bytes": 2**20, "retries": 1200}, ["1.0 MiB resident", "1,200 allocation retries"]),
])  # fmt: skip
def test_the_memory_of_a_rank_is_what_its_newest_line_says(line: dict[str, int] | None, says: list[str]) -> None:
    assert memory_now(None if line is None else read(RankMetrics, {"step": 1, **line})) == says
