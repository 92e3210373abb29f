"""The heat map of the ranks as rows of text: a sign a cell, its level in digits or values where there is room."""

from .heat import Heat
from .mesh_grid import GAP, Grid, GridPart, corner, places
from .rank_figures import Measured
from .rank_states import GONE, OVER, SILENT, STUCK, UNKNOWN
from .sheet import Marks, Row, Span, fit, joined, left, restyled, right, row, wrapped


def map_rows(grid: Grid, found: Heat, measured: Measured, chosen: int, width: int, marks: Marks) -> list[Row]:
    """The headings of the columns, then a row of cells each. chosen: the cell under the cursor."""
    rows = _headings(grid, width, marks)
    for number in range(grid.num_rows):
        spans: list[Span] = [(right(grid.row_label(number), grid.label_width, marks), "dim"), (" " * GAP, "")]
        first = number * grid.num_columns
        for index in range(first, first + grid.num_columns):
            cell = cell_spans(found, index, measured, grid.cell_width, marks)
            spans += restyled(cell, "cursor") if index == chosen else cell
        rows.append(fit(tuple(spans), width, marks))
    return rows


def sign(state: int, level: int, marks: Marks) -> tuple[str, str]:
    """What a cell is drawn with, and in which style: the mark of a state that is no level, else a shade."""
    of_state = {GONE: (marks.dead, "bad"), STUCK: (marks.stuck, "bad"), SILENT: (marks.silent, "warn")}
    if state in of_state:
        return of_state[state]
    if level < 0 or state == UNKNOWN:
        return marks.unknown, "dim"
    if state == OVER:
        return marks.over, "bad"
    return marks.shades[level * len(marks.shades) // 10], f"heat{level}"


def cell_spans(found: Heat, index: int, measured: Measured, width: int, marks: Marks) -> Row:
    """One cell in `width` cells of the terminal."""
    if found.rank[index] < 0:
        return ((" " * width, ""),)
    level = int(found.level[index])
    mark = sign(int(found.state[index]), level, marks)
    if width == 1:
        return (mark,)
    if width == 3:
        return (mark, (f"{level if level >= 0 else '-'} ", ""))
    value = measured.words(float(found.value[index]))
    if width < 20:
        return (mark, (f" {left(value, width - 3, marks)} ", ""))
    shade, style = mark
    name = left(f"rank {int(found.rank[index]):,}", 9, marks)
    return ((shade * 3, style), (f" {name}{right(value, width - 15, marks)}  ", ""))


def _headings(grid: Grid, width: int, marks: Marks) -> list[Row]:
    """A line for each axis along the columns, its places above the columns where they begin."""
    shown = [place for place, part in enumerate(grid.columns) if part.cells > 1]
    rows = [_heading(grid, place, width, marks) for place in shown]
    # The names of the axes along the rows stand above their labels, in the last line.
    head = (right(corner(grid.rows, grid.columns), grid.label_width, marks), "dim")
    rows[-1:] = [(head, *rows[-1][1:])] if rows else [(head,)]
    return [fit(each, width, marks) for each in rows]


def _heading(grid: Grid, place: int, width: int, marks: Marks) -> Row:
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
    return row((right(part.name, grid.label_width, marks), "dim"), " " * GAP, (text, "dim"))


def legend_rows(measured: Measured, grid: Grid, found: Heat, width: int, most: int, marks: Marks) -> list[Row]:
    """What the signs mean, in words and numbers: where each shade begins, and the marks that are on the map; in at most
    `most` rows."""
    bounds = measured.scale.bounds(len(marks.shades))
    parts: list[Span] = [(marks.shades[0], "heat1"), (f" under {bounds[0]}", "dim")]
    for number, bound in enumerate(bounds, start=1):
        parts += [("  ", ""), (marks.shades[number], f"heat{2 * number + 1}"), (f" {bound}", "dim")]
    words = [f"{mark} {said}" for mark, said in _marked(found, marks)]
    rows = [row(*parts, ("+" if bounds else "", "dim"))]
    of = f"each cell is the worst of {grid.most:,} ranks" if grid.most > 1 else ""
    digits = "digits 0–9: ten levels, least to most" if grid.cell_width == 3 else ""
    said = joined([of, *words, digits], marks)
    rows += [row((line, "bold" if words or of else "dim")) for line in wrapped(said, width) if line]
    return [fit(each, width, marks) for each in rows[:most]]


def _marked(found: Heat, marks: Marks) -> list[tuple[str, str]]:
    """The marks that are on the map."""
    words = {GONE: (marks.dead, "gone"), STUCK: (marks.stuck, "stuck"), SILENT: (marks.silent, "silent")}
    words |= {OVER: (marks.over, "over plan"), UNKNOWN: ("blank", "no data yet")}
    there = {int(state) for state in found.state}
    if (found.level[(found.rank >= 0) & (found.state < SILENT)] < 0).any():
        there.add(UNKNOWN)
    return [pair for state, pair in words.items() if state in there]
