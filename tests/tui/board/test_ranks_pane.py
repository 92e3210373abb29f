"""Every key of the Ranks screen."""

from contextlib import AbstractAsyncContextManager
from typing import Any

from attrs import evolve
from dashboards import alone, piloted, text
from made_boards import a_beat, a_board, small_plan, some_ranks, started
from textual.color import Color
from textual.pilot import Pilot

from xtrain.tui.board.app import THEMES
from xtrain.tui.board.pane import HEAT, Sheet
from xtrain.tui.board.plan import RanksPane
from xtrain.tui.model.board import Board
from xtrain.tui.model.life import Ranks

PLAN = small_plan({"pp": 2, "fsdp": 4}, expert_axes={"pp": 2, "ep_replicate": 1, "ep_fsdp": 2, "ep": 2})
BOARD = a_board(
    PLAN,
    ranks=some_ranks(PLAN, step_seconds={5: 0.9}, busy_seconds={5: 0.84}, pulse={3: "gone"}),
    records=[started()],
)


def shown(board: Board, size: tuple[int, int] = (80, 24)) -> AbstractAsyncContextManager[tuple[Pilot[Any], RanksPane]]:
    return alone(RanksPane, board, size)


def rank(pane: RanksPane) -> int:
    """The rank whose details stand below the map."""
    return next(int(line.split()[1]) for line in text(pane).splitlines() if line.startswith("rank ") and "───" in line)


KEYS = {
    "right": 1, "l l": 2, "down": 4, "j right right": 6, "end": 7, "end left": 6, "end h h": 5, "end up": 3, "end k": 3,
    "end home": 0, "pagedown": 4, "pagedown pageup": 0, "w": 5, "g": 3, "g g": 5, "g g g": 3,
}  # fmt: skip


@piloted
async def test_keys_move_the_cursor_over_the_mesh() -> None:
    async with shown(BOARD) as (pilot, pane):
        for keys, found in KEYS.items():
            await pilot.press("home", *keys.split())
            assert rank(pane) == found, keys


@piloted
async def test_m_goes_through_the_figures_and_back() -> None:
    async with shown(BOARD) as (pilot, pane):
        seen = []
        for key in "mmmmmmM":
            await pilot.press(key)
            seen.append(text(pane).splitlines()[0].split(" · ")[1])
        assert seen == ["own work", "data wait", "communication", "memory", "heartbeat", "step time", "heartbeat"]


@piloted
async def test_v_is_the_table_that_o_and_r_sort() -> None:
    async with shown(BOARD) as (pilot, pane):
        await pilot.press("o", "r")  # of a map there is nothing to sort
        await pilot.press("v")
        assert "rank▴" in text(pane) and "1 to 8 of 8, by rank, least first" in text(pane)
        await pilot.press("o")
        assert "state▾" in text(pane) and "✗ gone" in text(pane).splitlines()[4]
        await pilot.press("o")
        assert "step▾" in text(pane) and text(pane).splitlines()[4].split()[1] == "5"
        await pilot.press("r")
        assert "step▴" in text(pane)
        await pilot.press("v")
        assert "step▴" not in text(pane) and "under 540 ms" in text(pane)


@piloted
async def test_enter_is_a_rank_in_full_and_escape_comes_back() -> None:
    async with shown(BOARD) as (pilot, pane):
        await pilot.press("w", "enter")
        assert text(pane).startswith("rank 5 ") and "esc: back" in text(pane)
        await pilot.press("down", "escape")
        assert "under 540 ms" in text(pane) and rank(pane) == 5
        await pilot.press("v", "enter", "enter", "escape")
        assert "under 540 ms" in text(pane)


@piloted
async def test_enter_on_a_cell_of_many_is_the_table_of_its_ranks() -> None:
    large = small_plan({"pp": 4, "fsdp": 128})
    async with shown(a_board(large, ranks=some_ranks(large, step_seconds={300: 0.9})), (40, 12)) as (pilot, pane):
        assert "each cell is the worst of" in text(pane)
        await pilot.press("w", "enter")
        assert "of 512 ranks" in text(pane).splitlines()[0]
        assert any(line.startswith("›   300") for line in text(pane).splitlines())
        await pilot.press("escape")
        assert "each cell is the worst of" in text(pane)


@piloted
async def test_e_is_the_mesh_as_experts_see_it() -> None:
    async with shown(BOARD) as (pilot, pane):
        assert "pp\\fsdp" in text(pane)
        await pilot.press("e")
        assert "ep_fsdp" in text(pane).split("rank 0 ")[0]
        await pilot.press("e")
        assert "pp\\fsdp" in text(pane)


@piloted
async def test_a_click_chooses_a_cell_or_a_line() -> None:
    async with shown(BOARD) as (pilot, pane):
        page = pane._page
        assert page is not None and page.grid is not None
        at = page.grid.label_width + 1 + 2 * page.grid.cell_width
        await pilot.click(Sheet, offset=(at, page.first_row + 1))
        assert rank(pane) == 6
        await pilot.press("v")
        assert pane._page is not None
        await pilot.click(Sheet, offset=(5, pane._page.first_row + 2))
        assert any(line.startswith("›     2 ") for line in text(pane).splitlines())


@piloted
async def test_a_new_board_changes_what_is_shown_and_not_the_cursor() -> None:
    async with shown(BOARD) as (pilot, pane):
        await pilot.press("right")
        ranks = some_ranks(PLAN, step_seconds={1: 0.777}, beat={1: a_beat(1, node="step.fetch")})
        pane.show(evolve(BOARD, ranks=ranks, version=2))
        assert rank(pane) == 1 and "777 ms, median 500 ms, +55%" in text(pane) and "step 41, step.fetch" in text(pane)


@piloted
async def test_before_there_are_ranks_it_says_so() -> None:
    async with shown(a_board(None, ranks=Ranks())) as (pilot, pane):
        assert "No rank has sent a heartbeat yet." in text(pane)
        await pilot.press(*["down", "v", "o", "r", "m", "e", "w", "g", "enter", "escape"])
        pane.show(BOARD)
        assert rank(pane) == 0


@piloted
async def test_another_size_is_drawn_anew() -> None:
    async with shown(BOARD) as (pilot, pane):
        await pilot.press("w")
        for width, height in ((200, 50), (60, 20), (40, 12)):
            await pilot.resize_terminal(width, height)
            await pilot.pause()
            assert pane._page is not None and len(pane._page.rows) == height and pane._page.rank == 5


def contrast(one: Color, other: Color) -> float:
    """As WCAG counts it, from 1 to 21."""

    def luminance(color: Color) -> float:
        parts = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in color.normalized]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@piloted
async def test_texts_and_signs_can_be_seen_in_every_theme() -> None:
    async with shown(BOARD, (120, 40)) as (pilot, pane):
        for theme in THEMES:
            pilot.app.register_theme(theme)
            pilot.app.theme = theme.name
            await pilot.pause()
            sheet = pane.query_one(Sheet)
            ground = Color.parse(theme.background or "")
            for y in range(sheet.size.height):
                for segment in sheet.render_line(y):
                    assert segment.style is not None and segment.style.color is not None
                    seen = Color.from_rich_color(segment.style.color)
                    assert segment.text.isspace() or contrast(seen, ground) >= 3, (theme.name, segment)
            assert all(contrast(Color.parse(heat), ground) >= 3 for heat in HEAT)
