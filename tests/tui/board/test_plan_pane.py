"""Every key of the Plan screen."""

from contextlib import AbstractAsyncContextManager
from typing import Any

from attrs import evolve
from dashboards import alone, piloted, text
from made_boards import a_beat, a_board, small_plan, some_ranks
from textual.pilot import Pilot

from xtrain.tui.board.pane import Sheet
from xtrain.tui.board.plan import PlanPane
from xtrain.tui.model.board import Board
from xtrain.tui.pages.sheet import plain


def shown(board: Board, size: tuple[int, int] = (80, 22)) -> AbstractAsyncContextManager[tuple[Pilot[Any], PlanPane]]:
    return alone(PlanPane, board, size)


def cursor(pane: PlanPane) -> str:
    """The line with the sign of the cursor."""
    return next((line[1:].split("│")[0].strip(" ▶✓") for line in text(pane).splitlines() if line.startswith("›")), "")


BOARD = a_board(small_plan())


@piloted
async def test_the_screen_begins_at_the_node_under_way() -> None:
    async with shown(BOARD) as (_, pane):
        assert cursor(pane).startswith("step.forward_backward")


KEYS = {
    "down": "step.optimizer",
    "j j": "▾ Ticks",
    "up": "step.fetch",
    "k k": "▾ Step",
    "home": "▾ Set-up",
    "end": "shutdown.leave",
    "pagedown": "shutdown.leave",
    "home pagedown": "tick.eval.web",
    "pageup": "▾ Set-up",
    "right_square_bracket": "▾ Ticks",
    "left_square_bracket": "▾ Step",
    "left": "▸ Step",
    "left right": "▾ Step",
    "home f": "step.forward_backward",
}


@piloted
async def test_keys_move_the_cursor() -> None:
    async with shown(BOARD) as (pilot, pane):
        for keys, found in KEYS.items():
            await pilot.press("f", *keys.split())
            assert cursor(pane).startswith(found), keys


@piloted
async def test_enter_opens_a_node_in_full_and_escape_comes_back() -> None:
    async with shown(BOARD) as (pilot, pane):
        await pilot.press("enter")
        assert text(pane).startswith("step.forward_backward ─") and "accumulate = 2" in text(pane)
        await pilot.press("escape")
        assert cursor(pane).startswith("step.forward_backward")
        await pilot.press("left", "enter")
        assert cursor(pane).startswith("▾ Step")


@piloted
async def test_b_shows_where_the_time_goes() -> None:
    async with shown(BOARD) as (pilot, pane):
        assert "step time by node" not in text(pane)
        await pilot.press("b")
        assert "step time by node" in text(pane) and cursor(pane)
        await pilot.press("b")
        assert "step time by node" not in text(pane)


@piloted
async def test_on_a_small_screen_b_is_a_page_of_its_own() -> None:
    async with shown(BOARD, (60, 14)) as (pilot, pane):
        await pilot.press("b")
        assert text(pane).startswith("step time by node") and not cursor(pane)
        await pilot.press("b")
        assert cursor(pane).startswith("step.forward_backward")
        await pilot.press("b", "escape")
        assert cursor(pane).startswith("step.forward_backward")


@piloted
async def test_a_search_filters_while_it_is_typed() -> None:
    async with shown(BOARD) as (pilot, pane):
        await pilot.press("slash", *"save")
        assert "3 of 12 nodes have “save”" in text(pane)
        await pilot.press("enter", "end")
        assert cursor(pane).startswith("event.control.checkpoint")
        await pilot.press("escape")
        assert "12 nodes" in text(pane).splitlines()[0] and cursor(pane).startswith("event.control.checkpoint")


@piloted
async def test_escape_ends_a_search_that_is_being_typed() -> None:
    async with shown(BOARD) as (pilot, pane):
        await pilot.press("slash", *"eval", "escape")
        assert "12 nodes" in text(pane).splitlines()[0] and not pane.has_class("searching")
        await pilot.press("down")
        assert cursor(pane)


@piloted
async def test_a_click_chooses_a_node() -> None:
    async with shown(BOARD) as (pilot, pane):
        lines = text(pane).splitlines()
        await pilot.click(Sheet, offset=(6, next(y for y, line in enumerate(lines) if "step.fetch" in line)))
        assert cursor(pane).startswith("step.fetch")


@piloted
async def test_a_new_board_changes_the_numbers_and_not_the_cursor() -> None:
    async with shown(BOARD) as (pilot, pane):
        await pilot.press("up")
        node_seconds = {0: {"step.fetch": 0.777, "step.forward_backward": 0.1, "step.optimizer": 0.1}}
        ranks = some_ranks(small_plan(), node_seconds=node_seconds, beat={0: a_beat(0, node="step.fetch")})
        pane.show(evolve(BOARD, ranks=ranks, version=2))
        assert cursor(pane).startswith("step.fetch") and "777 ms" in text(pane)


@piloted
async def test_without_a_plan_it_says_so() -> None:
    async with shown(a_board(None)) as (pilot, pane):
        assert "The run has no plan yet." in text(pane)
        await pilot.press("down", "enter", "b", "f", "slash", "escape")
        pane.show(BOARD)
        assert cursor(pane).startswith("step.forward_backward")


@piloted
async def test_another_size_is_drawn_anew() -> None:
    async with shown(BOARD) as (pilot, pane):
        for width, height in ((200, 50), (60, 20), (40, 12)):
            await pilot.resize_terminal(width, height)
            await pilot.pause()
            rows = pane._page.rows if pane._page else []
            assert len(rows) == height and all(len(plain(row)) <= width for row in rows)
            assert cursor(pane).startswith("step.forward_backward")
