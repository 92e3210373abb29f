"""Curves as rows of text: a head with the last values, axes, and as many cells of dots as are left."""

from collections.abc import Sequence

import numpy as np
from attrs import evolve, frozen

from xtrain.tui.curves.canvas import ASCII, MOST_LINES, UNICODE, Canvas, Glyphs, Row
from xtrain.tui.curves.curve import Curve, CurveColumns, Line
from xtrain.tui.curves.plot_head import head
from xtrain.tui.curves.ticks import Unit, labels, log_ticks, own_labels, short_label, ticks
from xtrain.tui.curves.viewport import Extent, Viewport

__all__ = ["ASCII", "UNICODE", "Curve", "Drawing", "Line", "Unit", "Viewport", "draw", "extent_of"]

# Larger values are drawn at the border: their differences must not overflow.
_LARGEST = 1e300
_SHORT_OF_ROWS = 5


@frozen(kw_only=True)
class Drawing:
    """Drawn plot: rows of equal width. left, width: first column and number of columns of the curves.

    heads: number of rows above the curves. seen: the x values at the left and right border of the curves.
    """

    rows: tuple[Row, ...]
    heads: int = 0
    left: int = 0
    width: int = 0
    seen: Extent = (0.0, 0.0)

    def place_at(self, column: int) -> float:
        """Return the x value in the middle of a column of the whole drawing."""
        low, high = self.seen
        share = (column - self.left + 0.5) / max(1, self.width)
        return low + min(1.0, max(0.0, share)) * (high - low)

    def with_head(self, rows: Sequence[Row]) -> "Drawing | None":
        """Return the same curves under another head; None if its number of rows differs."""
        if not self.rows or len(rows) != self.heads:
            return None
        width = sum(len(text) for text, _ in self.rows[0])
        return evolve(self, rows=(*_padded(rows, width, self.heads), *self.rows[self.heads :]))


def extent_of(curves: Sequence[Curve]) -> Extent | None:
    """Return the first and last x of all curves; None without points."""
    some = [curve for curve in curves if len(curve)]
    return (min(float(c.x[0]) for c in some), max(float(c.x[-1]) for c in some)) if some else None


def draw(
    curves: Sequence[Curve],
    view: Viewport,
    width: int,
    height: int,
    *,
    title: str,
    x_label: str = "step",
    unit: Unit = "number",
    x_unit: Unit = "count",
    glyphs: Glyphs = UNICODE,
    newest: Sequence[float | None] = (),
) -> Drawing:
    """Draw at most eight curves in `width` x `height` cells, plus background curves; the head names the number left
    out.

    newest: see `plot_head.head`.
    """
    if width < 1 or height < 1:
        return Drawing(rows=())
    named = [curve for curve in curves if not curve.line.dim]
    behind = [curve for curve in curves if curve.line.dim]
    shown = named[:MOST_LINES]
    heads = head(named, view, width, height, title=title, x_label=x_label, unit=unit, glyphs=glyphs, newest=newest)
    extent = extent_of([*shown, *behind])
    below = min(2, max(0, height - len(heads) - 2))
    num_rows = height - len(heads) - below
    if num_rows < 1 or extent is None:
        body = [_words("no values yet", width)] if extent is None and height > len(heads) else []
        return Drawing(rows=_padded([*heads, *body], width, height), heads=len(heads))
    seen = view.seen(extent)
    drawn_from = seen if seen[1] > seen[0] else (seen[0] - 0.5, seen[1] + 0.5)
    # Wide enough for most labels; the drawn values depend on the label width, and labels on the drawn values.
    dots = glyphs.bits.shape[1]
    sources = _sources([*shown, *behind], view, drawn_from, width * dots)
    guess = [curve.columns(*drawn_from, max(1, width - 7) * dots, log=view.log) for _, curve, _ in sources]
    span = _value_range(guess, log=view.log)
    if span is None:
        rows = _padded([*heads, _words("no values here", width)], width, height)
        return Drawing(rows=rows, heads=len(heads), seen=drawn_from)
    marks = _y_labels(*span, num_rows, unit, log=view.log)
    left = max((len(label) for _, label in marks), default=0) + 1
    if width - left < 8:
        marks, left = [], 0
    num_columns = width - left - (1 if left else 0)
    canvas = Canvas(num_rows, num_columns, glyphs)
    above = []
    for line, curve, dim in sources:
        columns = curve.columns(*drawn_from, canvas.num_columns, log=view.log)
        canvas.add(columns, *span, line, dim=dim)
        above += [] if dim else [(line, columns)]
    _mark(canvas, above, span, len(shown))
    if view.cursor is not None and drawn_from[0] <= view.cursor <= drawn_from[1]:
        share = (view.cursor - drawn_from[0]) / (drawn_from[1] - drawn_from[0])
        canvas.upright(min(num_columns - 1, int(share * num_columns)))
    offset = left + 1 if left else 0
    at_row = {canvas.row_of(value, *span): label for value, label in reversed(marks)}
    body = [_with_label(row, at_row.get(place), left, glyphs) for place, row in enumerate(canvas.rows())]
    body += _x_axis(drawn_from, num_columns, offset, x_label, x_unit, below, glyphs)
    rows = _padded([*heads, *body], width, height)
    return Drawing(rows=rows, heads=len(heads), left=offset, width=num_columns, seen=drawn_from)


def _sources(curves: Sequence[Curve], view: Viewport, seen: Extent, number: int) -> list[tuple[int, Curve, bool]]:
    """Return (line, curve to draw, whether in the background), in drawing order."""
    above, below = [], []
    for line, curve in enumerate(curves):
        source = curve.positive if view.log else curve
        if curve.line.dim:
            below.append((MOST_LINES, source, True))
        elif view.smoothing and len(source) > 1:
            above.append((line, source.smoothed(view.smoothing, *seen, number), False))
            below.append((line, source, True))
        else:
            above.append((line, source, False))
    return above + below


def _value_range(layers: Sequence[CurveColumns], *, log: bool) -> Extent | None:
    """Return the lowest and highest visible value, never equal; None without values."""
    ends = np.concatenate([np.concatenate((columns.low, columns.high)) for columns in layers])
    ends = ends[np.isfinite(ends)]
    if not len(ends):
        return None
    low, high = (float(np.clip(end, -_LARGEST, _LARGEST)) for end in (ends.min(), ends.max()))
    if high - low > max(abs(low), abs(high)) * 1e-12:
        return low, high
    room = 0.5 if log else abs(low) * 0.05 or 1.0
    return low - room, high + room


def _y_labels(low: float, high: float, num_rows: int, unit: Unit, *, log: bool) -> list[tuple[float, str]]:
    """Return pairs (position on the axis, label); with few rows, of both ends instead of round values."""
    if log:
        values = log_ticks(10**low, 10**high, max(2, num_rows // 2), unit)
        if num_rows < _SHORT_OF_ROWS or len(values) < 2:
            values = [10**low, 10**high]
        return [(float(np.log10(value)), short_label(value, unit)) for value in values]
    values = ticks(low, high, max(2, num_rows // 2), unit)
    if num_rows < _SHORT_OF_ROWS or len(values) < 2:
        values = [low, high] if num_rows > 1 else [high]
    return list(zip(values, labels(values, unit), strict=True))


def _mark(canvas: Canvas, layers: Sequence[tuple[int, CurveColumns]], span: Extent, num_lines: int) -> None:
    """Draw signs on lines: at intervals if there are several lines, and on a lone point, which a dot would hide."""
    dots = canvas.num_columns // canvas.width
    apart = max(10, canvas.width // 4)
    for line, columns in layers:
        here = np.flatnonzero(np.isfinite(columns.high))
        if not len(here):
            continue
        places = [int(here[-1])] if num_lines > 1 or len(here) == 1 else []
        if num_lines > 1:
            first = (2 * line + 1) * apart // (2 * num_lines)
            wanted = np.arange(first, canvas.width, apart) * dots
            places += [int(place) for place in wanted if np.isfinite(columns.high[place])]
        for place in places:
            canvas.mark(canvas.row_of(float(columns.high[place]), *span), place // dots, line)


def _with_label(row: Row, label: str | None, left: int, glyphs: Glyphs) -> Row:
    if not left:
        return row
    upright = glyphs.upright if label is None else glyphs.upright_tick
    return ((f"{label or '':>{left - 1}} {upright}"[-left - 1 :], "axis"), *row)


def _x_axis(
    seen: Extent, num_columns: int, offset: int, x_label: str, unit: Unit, num_rows: int, glyphs: Glyphs
) -> list[Row]:
    """Return the axis line with its ticks, and their labels; only the labels if there is one row."""
    values = ticks(*seen, max(1, num_columns // 10), unit)
    line, below = [glyphs.level] * num_columns, [" "] * (offset + num_columns)
    name = x_label[: max(0, offset - 1)] if offset > len(x_label) else ""
    below[: len(name)] = name
    free = offset
    for value, label in zip(values, own_labels(values, unit), strict=True):
        column = min(num_columns - 1, int((value - seen[0]) / (seen[1] - seen[0]) * num_columns))
        start = min(max(free, offset + column - len(label) // 2), offset + num_columns - len(label))
        if start < free or abs(offset + column - start - len(label) // 2) > len(label):
            continue
        below[start : start + len(label)] = label
        line[column] = glyphs.level_tick
        free = start + len(label) + 2
    if not name and len(below) - free >= len(x_label):
        below[len(below) - len(x_label) :] = x_label
    corner = " " * (offset - 1) + glyphs.corner if offset else ""
    axis = [((corner + "".join(line), "axis"),), (("".join(below), "axis"),)]
    return axis[2 - num_rows :] if num_rows else []


def _words(text: str, width: int) -> Row:
    return ((text[:width].center(width), "note"),)


def _padded(rows: Sequence[Row], width: int, height: int) -> tuple[Row, ...]:
    """Return exactly `height` rows, each exactly `width` wide."""
    blank: Row = ((" " * width, ""),)
    found = []
    for row in rows[:height]:
        used = sum(len(text) for text, _ in row)
        found.append((*row, (" " * (width - used), "")) if used < width else row)
    return (*found, *[blank] * (height - len(found)))
