"""Ranks as a heat map of the mesh, and as a table that sorts by any column."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import ceil, log, prod

import numpy as np
from attrs import evolve, field, frozen
from numpy import ndarray

from xtrain.text.units import size
from xtrain.tui.model.life import OneRank
from xtrain.tui.model.planned import PlannedAxis
from xtrain.tui.pages.rank_figures import (
    COMMUNICATION,
    DATA,
    FINE,
    GONE,
    MEMORY,
    OVER,
    PROGRESS,
    SILENT,
    STEP,
    STUCK,
    UNKNOWN,
    WORDS,
    WORK,
    Figure,
    Heat,
    Measured,
    RankFacts,
    current_step,
    expected,
)
from xtrain.tui.pages.sheet import (
    CURSOR,
    DEAD,
    DOWN,
    OVER_SIGN,
    SHADES,
    SILENT_SIGN,
    STUCK_SIGN,
    UP,
    Row,
    Span,
    fit,
    joined,
    left,
    restyled,
    right,
    row,
    wrapped,
)

# Widths of a cell: signs, rank and value; a sign and a value; a sign and a digit; a sign alone. The widest that fits is
# taken, the first one only for few ranks: a map of many is not to become a list.
CELL_WIDTHS = (22, 10, 3, 1)
FEW = 4
# Cells between the labels of rows and the first column.
GAP = 1


@frozen(kw_only=True)
class GridPart:
    """Axis of the mesh, or the outer or inner part of a divided axis, along rows or columns.

    size: places along it; stride: ranks between two of them; unit: coordinates of the axis that one place covers, more
    than 1 for an outer part; inner: the part is an inner one, whose places count from where the outer part begins.
    chunk: places that share a cell.
    """

    name: str
    size: int
    stride: int
    unit: int = 1
    inner: bool = False
    chunk: int = 1

    @property
    def cells(self) -> int:
        return ceil(self.size / self.chunk)

    def label(self, cell: int) -> str:
        """Return the coordinates of a cell: `3`, `8–15`, `+4`."""
        first = cell * self.chunk
        last = min(first + self.chunk, self.size) - 1
        low, high = first * self.unit, (last + 1) * self.unit - 1
        sign = "+" if self.inner else ""
        return f"{sign}{low}" if low == high else f"{sign}{low}–{high}"


@frozen(kw_only=True)
class Grid:
    """Rows and columns of cells, and the ranks of each. most: largest number of ranks in a cell."""

    world: int
    rows: tuple[GridPart, ...]
    columns: tuple[GridPart, ...]
    cell_width: int
    label_width: int
    cell_of: ndarray = field(eq=False, repr=False)
    """Cell of each rank: row × number of columns + column."""

    @property
    def num_rows(self) -> int:
        return prod(part.cells for part in self.rows)

    @property
    def num_columns(self) -> int:
        return prod(part.cells for part in self.columns)

    @property
    def most(self) -> int:
        return prod(part.chunk for part in (*self.rows, *self.columns))

    @property
    def heading(self) -> int:
        """Number of lines above the first row: one for each column axis whose cells differ."""
        return max(1, sum(part.cells > 1 for part in self.columns))

    def ranks(self, cell: int) -> ndarray:
        """Return the ranks of a cell, ascending."""
        return np.flatnonzero(self.cell_of == cell)

    def row_label(self, row: int) -> str:
        """Return `3 8–15`: the coordinates that the ranks of a row share, along the axes in which rows differ."""
        found = zip(self.rows, places(self.rows, row), strict=True)
        return " ".join(part.label(place) for part, place in found if part.cells > 1)


def places(parts: Sequence[GridPart], index: int) -> list[int]:
    """Return the cell along each part, of a row or column counted from 0."""
    found = []
    for part in reversed(parts):
        index, place = divmod(index, part.cells)
        found.append(place)
    return found[::-1]


@lru_cache(maxsize=64)
def lay_out(axes: tuple[PlannedAxis, ...], world: int, width: int, height: int) -> Grid:
    """Return the grid of `world` ranks that shows the most in `height` lines of `width` cells.

    The fewest ranks per cell come first, then the widest cells, then similar numbers of rows and columns. Without axes,
    ranks are numbered consecutively.
    """
    real = tuple(axis for axis in axes if axis.size > 1)
    if prod(axis.size for axis in real) != world:  # no plan, or a plan of another world size
        real = (PlannedAxis(name="rank", size=world, stride=1),) if world > 1 else ()
    best: tuple[tuple[float, ...], Grid] | None = None
    for rows, columns in _splits(real):
        for cell_width in CELL_WIDTHS[world > FEW :]:
            found = _fitted(rows, columns, world, cell_width, width, height)
            if best is None or found[0] < best[0]:
                best = found
    assert best is not None
    return best[1]


def _splits(axes: tuple[PlannedAxis, ...]) -> Iterator[tuple[tuple[GridPart, ...], tuple[GridPart, ...]]]:
    """Yield each division of the axes into outer ones for rows and inner ones for columns."""
    whole = tuple(GridPart(name=axis.name, size=axis.size, stride=axis.stride) for axis in axes)
    for place in range(len(whole) + 1):
        yield whole[:place], whole[place:]
    for place, axis in enumerate(whole):
        for inner in range(2, axis.size):
            if axis.size % inner == 0:
                outer = GridPart(name=axis.name, size=axis.size // inner, stride=axis.stride * inner, unit=inner)
                rest = GridPart(name=axis.name, size=inner, stride=axis.stride, inner=True)
                yield (*whole[:place], outer), (rest, *whole[place + 1 :])


def _fitted(
    rows: tuple[GridPart, ...], columns: tuple[GridPart, ...], world: int, cell_width: int, width: int, height: int
) -> tuple[tuple[float, ...], Grid]:
    """Return the grid with these axes, and its cost: lower is better."""
    rows = _merged(rows, max(1, height - max(1, len(columns))))
    shown = [part for part in rows if part.cells > 1]
    label_width = sum(map(_label_width, shown)) + max(0, len(shown) - 1)
    label_width = max(label_width, len(corner(rows, columns)), *(len(part.name) for part in columns), 0)
    room = width - label_width - GAP
    columns = _merged(columns, max(1, room // cell_width))
    num_rows, num_columns = (prod(part.cells for part in parts) for parts in (rows, columns))
    most = prod(part.chunk for part in (*rows, *columns))
    cut = any(part.inner for part in columns)
    uneven = abs(log(num_rows / num_columns)) + (1.0 if cut else 0.0)
    grid = Grid(
        world=world, rows=rows, columns=columns, cell_width=cell_width, label_width=label_width,
        cell_of=_cells(rows, columns, world),
    )  # fmt: skip
    overflow = float(room < cell_width or grid.heading + num_rows > height)
    return (overflow, most, -cell_width, uneven, num_rows), grid


def corner(rows: Sequence[GridPart], columns: Sequence[GridPart]) -> str:
    """Return `pp fsdp\\tp`: the head of the row labels, and left of the labels of the innermost column axis; one name
    where both are parts of the same axis."""
    inner = next((part.name for part in reversed(columns) if part.cells > 1), "")
    outer = " ".join(part.name for part in rows if part.cells > 1)
    both = outer and inner and outer.split()[-1] != inner
    return f"{outer}\\{inner}" if both else outer or inner


def _label_width(part: GridPart) -> int:
    return max(len(part.label(0)), len(part.label(part.cells - 1)), len(part.label(max(0, part.cells - 2))))


def _merged(parts: tuple[GridPart, ...], limit: int) -> tuple[GridPart, ...]:
    """Return the parts merged as little as `limit` cells allow, the innermost first."""
    found = list(parts)
    for place in reversed(range(len(parts))):
        outer = prod(part.size for part in parts[:place])
        allowed = limit // outer
        size = parts[place].size
        chunk = ceil(size / allowed) if allowed else size
        found[place] = _with_chunk(parts[place], chunk)
        if allowed:
            break
    return tuple(found)


def _with_chunk(part: GridPart, chunk: int) -> GridPart:
    # Cells that stand for equally many ranks are worth a few cells more or less.
    even = next((size for size in range(chunk, min(2 * chunk, part.size) + 1) if part.size % size == 0), chunk)
    chunk = even if even <= chunk * 4 / 3 else chunk
    return evolve(part, chunk=chunk)


def _cells(rows: tuple[GridPart, ...], columns: tuple[GridPart, ...], world: int) -> ndarray:
    ranks, index = np.arange(world), np.zeros(world, dtype=np.int64)
    for part in (*rows, *columns):
        index = index * part.cells + ranks // part.stride % part.size // part.chunk
    return index


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


@frozen(kw_only=True)
class TableColumn:
    """Column of the table. key: sort key; wide: width in cells; early: columns with a lower value get room first."""

    key: str
    title: str
    wide: int
    early: int
    figure: Figure | None = None


COLUMNS = (
    TableColumn(key="rank", title="rank", wide=6, early=0),
    TableColumn(key="state", title="state", wide=9, early=1),
    TableColumn(key="place", title="place", wide=36, early=9),
    TableColumn(key="step", title="step", wide=8, early=2, figure=STEP),
    TableColumn(key="work", title="own work", wide=8, early=7, figure=WORK),
    TableColumn(key="data", title="data", wide=8, early=6, figure=DATA),
    TableColumn(key="communication", title="comm", wide=8, early=5, figure=COMMUNICATION),
    TableColumn(key="memory", title="memory", wide=9, early=3, figure=MEMORY),
    TableColumn(key="planned", title="planned", wide=9, early=8),
    TableColumn(key="progress", title="idle", wide=6, early=4, figure=PROGRESS),
    TableColumn(key="node", title="current node", wide=28, early=10),
    TableColumn(key="host", title="host", wide=18, early=11),
)


def columns(facts: RankFacts, width: int) -> tuple[TableColumn, ...]:
    """Return the columns that fit in `width` cells, in order; text columns are as wide as their texts."""
    texts = {
        "place": len(" ".join(f"{axis.name} {axis.size - 1}" for axis in facts.axes if axis.size > 1)),
        "host": max((len(rank.beat.host) for rank in facts.ranks if rank.beat), default=0),
    }
    if not facts.memory:
        texts["planned"] = 0
    for column in COLUMNS:
        # Where waiting between ranks is not measured, an empty column would waste room.
        if column.figure in (WORK, COMMUNICATION) and facts.figure(column.figure).median is None:
            texts[column.key] = 0
    found = [_as_wide_as(column, texts.get(column.key)) for column in COLUMNS]
    room, shown = width - 1, set()
    for column in sorted(found, key=lambda each: each.early):
        if column.wide and column.wide + 1 <= room:
            shown.add(column.key)
            room -= column.wide + 1
    return tuple(column for column in found if column.key in shown)


def _as_wide_as(column: TableColumn, text: int | None) -> TableColumn:
    """Return the column limited to that text width; 0 is an empty column."""
    if text is None or not text:
        return column if text is None else evolve(column, wide=0)
    return evolve(column, wide=min(column.wide, max(len(column.title), text)))


def ordered(facts: RankFacts, ranks: Sequence[int], key: str, *, most_first: bool) -> list[int]:
    """Return the ranks in table order; ranks without a value come last."""
    figure = next((column.figure for column in COLUMNS if column.key == key), None)
    if figure is not None:
        sign_of = -1 if most_first else 1
        # Memory is compared in bytes, as it is shown, and not as a share of the plan.
        values = {rank: figure.of(facts.ranks[rank]) for rank in ranks}
        return sorted(ranks, key=lambda rank: (values[rank] is None, sign_of * (values[rank] or 0.0), rank))
    if key == "state":
        return sorted(
            ranks, key=lambda rank: (-int(facts.states.of[rank]) if most_first else int(facts.states.of[rank]), rank)
        )
    return sorted(ranks, reverse=most_first)


def table_head(shown: Sequence[TableColumn], key: str, width: int, *, most_first: bool) -> Row:
    """Return the titles, with a sign at the sort column."""
    spans: list[tuple[str, str] | str] = [" "]
    for column in shown:
        arrow = (DOWN if most_first else UP) if column.key == key else ""
        title = column.title if len(column.title) + len(arrow) <= column.wide else column.title[: column.wide - 1]
        put = right if column.figure or column.key in ("rank", "planned") else left
        spans.append((put(f"{title}{arrow}", column.wide) + " ", "title" if arrow else "dim"))
    return fit(row(*spans), width)


def table_row(rank: OneRank, facts: RankFacts, shown: Sequence[TableColumn], width: int, *, chosen: bool) -> Row:
    """Return the table row of one rank."""
    state = int(facts.states.of[rank.rank])
    mark, style = sign(state, 0)
    spans: list[tuple[str, str] | str] = [(CURSOR if chosen else " ", "mark")]
    for column in shown:
        if column.figure is not None:
            value = None if facts.over and column.figure is PROGRESS else column.figure.of(rank)
            text = right("–" if value is None else column.figure.words(value), column.wide)
            slow = column.figure is WORK and rank.rank in facts.states.slow
            plan = expected(rank, facts.memory) if column.figure is MEMORY else None
            over = plan is not None and value is not None and value > plan
            spans.append((f"{text} ", "bad" if over else "warn" if slow else ""))
        elif column.key == "state":
            words = WORDS[state] or ("ended" if facts.over else "ok" if rank.beat else "–")
            text = f"{mark} {words}" if state > FINE and style in ("bad", "warn") else words
            spans.append((f"{left(text, column.wide)} ", style if style in ("bad", "warn") else ""))
        else:
            spans.append(f"{_cell(rank, facts, column)} ")
    whole = fit(row(*spans), width)
    return restyled(whole, "cursor") if chosen else whole


def _cell(rank: OneRank, facts: RankFacts, column: TableColumn) -> str:
    if column.key == "rank":
        return right(f"{rank.rank:,}", column.wide)
    if column.key == "planned":
        plan = expected(rank, facts.memory)
        return right("–" if plan is None else size(plan), column.wide)
    if column.key == "place":
        text = " ".join(f"{name} {rank.coordinates.get(name, '–')}" for name in facts.real)
    elif column.key == "node":
        text = rank.beat.node if rank.beat else ""
    else:
        text = rank.beat.host if rank.beat else ""
    step = current_step(rank)
    if column.key == "node" and text and step is not None:
        text = f"{step:,} {text.removeprefix('step.')}" if step else text
    return left(text, column.wide)
