"""Dots of curves in cells."""

import numpy as np
import pytest

from xtrain.tui.curves.canvas import ASCII, UNICODE, Canvas, CurveColumns


def columns(*values: float, joined: bool = True) -> CurveColumns:
    found = np.array(values, dtype=float)
    return CurveColumns(found, found, np.full(len(found) - 1, joined))


def drawn(canvas: Canvas) -> list[str]:
    return ["".join(text for text, _ in row) for row in canvas.rows()]


@pytest.mark.parametrize("values", [(0, 9), (9, 0), (0, 9, 0), (9, 0, 9), (0, 3, 9, 1)])
def test_a_steep_line_has_no_holes_and_is_one_sign_thick(values: tuple[float, ...]) -> None:
    canvas = Canvas(10, len(values), ASCII)
    canvas.add(columns(*values), 0, 9, 0)
    rows = drawn(canvas)
    for left in range(len(values) - 1):
        ends = [[number for number, row in enumerate(rows) if row[column] == "*"] for column in (left, left + 1)]
        low, high = sorted((9 - values[left], 9 - values[left + 1]))
        # Between two columns each row is drawn, and none in both of them, unless a peak turns back.
        assert {*ends[0], *ends[1]} >= set(range(int(low), int(high) + 1))
        if len(values) == 2:
            assert not {*ends[0]} & {*ends[1]}


def test_what_is_not_joined_stays_apart() -> None:
    canvas = Canvas(10, 2, ASCII)
    canvas.add(columns(0, 9, joined=False), 0, 9, 0)
    assert sum(row.count("*") for row in drawn(canvas)) == 2


def test_a_cell_of_two_lines_holds_the_dots_of_both_in_the_style_of_the_first() -> None:
    canvas = Canvas(1, 1, UNICODE)
    canvas.add(columns(0, 0), 0, 3, 0)
    canvas.add(columns(3, 3), 0, 3, 1)
    assert canvas.rows() == [((chr(0x2800 + 0x40 + 0x80 + 0x01 + 0x08), "line0"),)]


def test_signs_and_the_cursor_leave_what_is_there() -> None:
    canvas = Canvas(2, 3, ASCII)
    canvas.add(columns(0, 0, 0), 0, 1, 0)
    canvas.mark(0, 1, 2)
    canvas.mark(0, 1, 3)  # the first one stays
    canvas.mark(5, 5, 1)
    canvas.upright(0)
    assert drawn(canvas) == ["|+ ", "***"]
    assert canvas.row_of(1, 0, 1) == 0 and canvas.row_of(0, 0, 1) == 1
