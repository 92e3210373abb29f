"""The ranks of a mesh laid out as rows and columns of cells, however many ranks and however small the screen.

Axes go from outer to inner: the outer ones become rows, the inner ones columns, and one of them may be cut in two where
that uses the screen better. Where cells do not suffice, neighbours along an axis share one.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import ceil, log, prod

import numpy as np
from attrs import field, frozen
from numpy import ndarray

from xtrain.tui.model.planned import PlannedAxis

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
    return GridPart(name=part.name, size=part.size, stride=part.stride, unit=part.unit, inner=part.inner, chunk=chunk)


def _cells(rows: tuple[GridPart, ...], columns: tuple[GridPart, ...], world: int) -> ndarray:
    ranks, index = np.arange(world), np.zeros(world, dtype=np.int64)
    for part in (*rows, *columns):
        index = index * part.cells + ranks // part.stride % part.size // part.chunk
    return index
