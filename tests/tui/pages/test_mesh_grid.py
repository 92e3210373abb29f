"""Meshes of any shape on screens of any size: every rank has a cell, and neighbours along an axis stay neighbours."""

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_boards import small_plan

from xtrain.tui.pages.rank_map import GAP, Grid, lay_out, places

AXES = ("pp", "replicate", "fsdp", "ring", "ulysses", "tp")
SIZES = st.lists(st.integers(1, 7), min_size=6, max_size=6)


def grid_of(sizes: dict[str, int], width: int, height: int) -> Grid:
    return lay_out(small_plan(sizes).axes, prod(sizes.values()), width, height)


@settings(max_examples=60, deadline=None)
@given(SIZES, st.integers(24, 150), st.integers(7, 40))
def test_every_rank_has_one_cell_that_is_on_the_screen(sizes: list[int], width: int, height: int) -> None:
    axes = dict(zip(AXES, sizes, strict=True))
    grid = grid_of(axes, width, height)
    cells = grid.num_rows * grid.num_columns
    assert len(grid.cell_of) == prod(sizes)
    assert grid.cell_of.min() >= 0 and grid.cell_of.max() < cells
    assert grid.num_rows + grid.heading <= height
    assert grid.label_width + GAP + grid.num_columns * grid.cell_width <= width
    ranks_of_cell = np.bincount(grid.cell_of, minlength=cells)
    assert ranks_of_cell.max() <= grid.most and (grid.most == 1) == bool((ranks_of_cell == 1).all())
    assert ranks_of_cell.min() >= 1


@settings(max_examples=40, deadline=None)
@given(SIZES, st.integers(24, 150), st.integers(7, 40))
def test_the_labels_of_a_row_hold_for_all_of_its_ranks(sizes: list[int], width: int, height: int) -> None:
    axes = dict(zip(AXES, sizes, strict=True))
    plan = small_plan(axes)
    grid = grid_of(axes, width, height)
    for rank in range(0, prod(sizes), 1 + prod(sizes) // 50):
        at = plan.coordinates(rank)
        row, column = divmod(int(grid.cell_of[rank]), grid.num_columns)
        for parts, index in ((grid.rows, row), (grid.columns, column)):
            for part, place in zip(parts, places(parts, index), strict=True):
                own = at[part.name] % (part.size * part.unit) if part.inner else at[part.name]
                low = place * part.chunk * part.unit
                assert low <= own < low + part.chunk * part.unit


def test_a_mesh_that_fits_is_shown_rank_by_rank_with_values() -> None:
    grid = grid_of({"pp": 2, "fsdp": 4}, 70, 10)
    assert (grid.num_rows, grid.num_columns, grid.most, grid.cell_width) == (2, 4, 1, 10)
    assert grid.cell_of.tolist() == list(range(8))
    assert grid.row_label(1) == "1"


def test_one_axis_is_cut_in_two_where_that_uses_the_screen_better() -> None:
    grid = grid_of({"fsdp": 64}, 76, 7)
    assert (grid.num_rows, grid.num_columns, grid.most) == (4, 16, 1)
    assert [grid.row_label(row) for row in range(4)] == ["0–15", "16–31", "32–47", "48–63"]
    assert [part.label(3) for part in grid.columns] == ["+3"]


@pytest.mark.parametrize(("width", "height"), [(120, 40), (72, 30), (80, 12), (60, 9), (40, 7)])
def test_sixteen_thousand_ranks_share_cells_and_say_so(width: int, height: int) -> None:
    grid = grid_of({"pp": 8, "fsdp": 128, "ulysses": 4, "tp": 4}, width, height)
    cells = grid.num_rows * grid.num_columns
    assert grid.cell_width == 1 and cells * grid.most >= 16_384 > cells
    # No fewer ranks share a cell than must, but for what neat axes cost.
    assert grid.most <= 8 * 16_384 / ((width - grid.label_width) * (height - grid.heading)) + 8


def test_without_a_plan_ranks_are_counted_through() -> None:
    grid = lay_out((), 6, 40, 8)
    assert sorted(grid.cell_of.tolist()) == list(range(6))
    assert {part.name for part in (*grid.rows, *grid.columns)} == {"rank"}


def test_a_plan_of_another_world_is_not_believed() -> None:
    grid = lay_out(small_plan({"fsdp": 4}).axes, 6, 40, 8)
    assert len(grid.cell_of) == 6 and {part.name for part in (*grid.rows, *grid.columns)} == {"rank"}


def test_one_rank_has_one_cell() -> None:
    grid = grid_of({"fsdp": 1}, 40, 8)
    assert (grid.num_rows, grid.num_columns, grid.most, grid.cell_of.tolist()) == (1, 1, 1, [0])


def test_the_ranks_of_a_cell() -> None:
    grid = grid_of({"fsdp": 512}, 30, 8)
    by_cell = [grid.ranks(cell).tolist() for cell in range(grid.num_rows * grid.num_columns)]
    assert sorted(rank for ranks in by_cell for rank in ranks) == list(range(512))
    assert all(ranks == sorted(ranks) for ranks in by_cell) and max(map(len, by_cell)) == grid.most
