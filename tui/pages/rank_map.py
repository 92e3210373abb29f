"""The heat map of the ranks as rows of text: a sign a cell, its level in digits or values where there is room."""

from xtrain.tui.pages.heat import Heat
from xtrain.tui.pages.mesh_grid import GAP, Grid, GridPart, corner, places
from xtrain.tui.pages.rank_figures import Measured
from xtrain.tui.pages.rank_states import GONE, OVER, SILENT, STUCK, UNKNOWN
from xtrain.tui.pages.sheet import (
    DEAD,
    OVER_SIGN,
    SHADES,
    SILENT_SIGN,
    STUCK_SIGN,
    Row,
    Span,
    fit,
    joined,
    left,
    restyled,
    right,
    row,
    wrapped,
)  # fmt: skip


def map_rows(grid: Grid, found: Heat, measured: Measured, chosen: int, width: int) -> list[Row]:
    """Return the headings of the columns, then the rows of cells. chosen: the cell under the cursor."""
    rows = _headings(grid, width)
    for number in range(grid.num_rows):
        spans: list[Span] = [(right(grid.row_label(number), grid.label_width), "dim"), (" " * GAP, "")]
        first = number * grid.num_columns
        for index in range(first, first + grid.num_columns):
            cell = cell_spans(found, index, measured, grid.cell_width)
            spans += restyled(cell, "cursor") if index == chosen else cell
        rows.append(fit(tuple(spans), width))
    return rows


def sign(state: int, level: int) -> tuple[str, str]:
    """Return the sign of a cell and its style: the mark of a state without a level, else a shade."""
    of_state = {GONE: (DEAD, "bad"), STUCK: (STUCK_SIGN, "bad"), SILENT: (SILENT_SIGN, "warn")}
    if state in of_state:
        return of_state[state]
    if level < 0 or state == UNKNOWN:
        return " ", "dim"
    if state == OVER:
        return OVER_SIGN, "bad"
    return SHADES[level * len(SHADES) // 10], f"heat{level}"


def cell_spans(found: Heat, index: int, measured: Measured, width: int) -> Row:
    """Return one cell of the map in `width` terminal cells."""
    if found.rank[index] < 0:
        return ((" " * width, ""),)
    level = int(found.level[index])
    mark = sign(int(found.state[index]), level)
    if width == 1:
        return (mark,)
    if width == 3:
        return (mark, (f"{level if level >= 0 else '-'} ", ""))
    value = measured.words(float(found.value[index]))
    if width < 20:
        return (mark, (f" {left(value, width - 3)} ", ""))
    shade, style = mark
    name = left(f"rank {int(found.rank[index]):,}", 9)
    return ((shade * 3, style), (f" {name}{right(value, width - 15)}  ", ""))


def _headings(grid: Grid, width: int) -> list[Row]:
    """Return a line for each column axis, with its labels above the columns where they begin."""
    shown = [place for place, part in enumerate(grid.columns) if part.cells > 1]
    rows = [_heading(grid, place, width) for place in shown]
    # The names of the axes along the rows stand above their labels, in the last line.
    head = (right(corner(grid.rows, grid.columns), grid.label_width), "dim")
    rows[-1:] = [(head, *rows[-1][1:])] if rows else [(head,)]
    return [fit(each, width) for each in rows]


def _heading(grid: Grid, place: int, width: int) -> Row:
    part: GridPart = grid.columns[place]
    text, free = "", 0
    for column in range(grid.num_columns):
        along = places(grid.columns, column)
        if column and along[: place + 1] == places(grid.columns, column - 1)[: place + 1]:
            continue
        at, label = column * grid.cell_width, part.label(along[place])
        if at >= free:
            text = text.ljust(at) + label
            free = len(text) + 1
    return row((right(part.name, grid.label_width), "dim"), " " * GAP, (text, "dim"))


def legend_rows(measured: Measured, grid: Grid, found: Heat, width: int, most: int) -> list[Row]:
    """Return the meaning of the signs: lower edges of the shades, and the marks on the map; in at most `most` rows."""
    bounds = measured.scale.bounds(len(SHADES))
    parts: list[Span] = [(SHADES[0], "heat1"), (f" under {bounds[0]}", "dim")]
    for number, bound in enumerate(bounds, start=1):
        parts += [("  ", ""), (SHADES[number], f"heat{2 * number + 1}"), (f" {bound}", "dim")]
    words = [f"{mark} {said}" for mark, said in _marked(found)]
    rows = [row(*parts, ("+" if bounds else "", "dim"))]
    of = f"each cell is the worst of {grid.most:,} ranks" if grid.most > 1 else ""
    digits = "digits 0–9: ten levels, least to most" if grid.cell_width == 3 else ""
    said = joined([of, *words, digits])
    rows += [row((line, "bold" if words or of else "dim")) for line in wrapped(said, width) if line]
    return [fit(each, width) for each in rows[:most]]


def _marked(found: Heat) -> list[tuple[str, str]]:
    """Return the marks on the map."""
    words = {GONE: (DEAD, "gone"), STUCK: (STUCK_SIGN, "stuck"), SILENT: (SILENT_SIGN, "silent")}
    words |= {OVER: (OVER_SIGN, "over plan"), UNKNOWN: ("blank", "no data yet")}
    there = {int(state) for state in found.state}
    if (found.level[(found.rank >= 0) & (found.state < SILENT)] < 0).any():
        there.add(UNKNOWN)
    return [pair for state, pair in words.items() if state in there]
