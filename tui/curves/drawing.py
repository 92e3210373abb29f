"""Drawing of curves as rows of text: head with values, axes with round ticks, and dots."""

import math
from collections.abc import Sequence

import numpy as np
from attrs import evolve, frozen
from rich.cells import cell_len, set_cell_size

from xtrain.text.units import printable
from xtrain.tui.curves.axis import Unit, exact, labels, log_ticks, one_label, own_labels, short_label, ticks
from xtrain.tui.curves.canvas import MOST_LINES, UNICODE, Canvas, Curve, CurveColumns, Glyphs, Row, Span
from xtrain.tui.curves.viewport import PERCENTILES, Extent, Viewport

_GAP = 2


def head(
    curves: Sequence[Curve],
    view: Viewport,
    width: int,
    height: int,
    *,
    title: str,
    x_label: str,
    unit: Unit,
    glyphs: Glyphs,
    newest: Sequence[float | None] = (),
) -> list[Row]:
    """Return the head: one row, or more if the values need them and a quarter of the height has room for them.

    newest: value of each curve shown without a cursor, where it is known before the curve has it. Curves beyond the
    number of distinct signs are counted.
    """
    curves, more = curves[:MOST_LINES], len(curves) - MOST_LINES
    pieces: list[Row] = [((printable(title), "title"),)]
    choices = [*view.describe()]
    if view.log and (left_out := sum(curve.left_out for curve in curves)):
        choices.append(f"{left_out:,} {glyphs.at_most} 0 left out")
    if choices:
        pieces.append(((glyphs.apart.join(choices), "note"),))
    if view.cursor is not None:
        pieces.append(((f"{x_label} {exact(view.cursor)}", "cursor"),))
    lasts = newest if len(newest) >= len(curves) else [curve.last for curve in curves]
    pieces += [
        _value(curve.line.number(place), curve, last, view, unit, len(curves), glyphs)
        for place, (curve, last) in enumerate(zip(curves, lasts, strict=False))
    ]
    if more > 0:
        pieces.append(((f"{more} more lines not drawn", "note"),))
    return _wrapped([piece for piece in pieces if _width(piece)], width, max(1, height // 4), glyphs)


def _value(line: int, curve: Curve, last: float | None, view: Viewport, unit: Unit, number: int, glyphs: Glyphs) -> Row:
    """Return `● web 2.345`: without sign and name where there is one line only."""
    name: tuple[Span, ...] = ()
    if number > 1:
        name = ((f"{glyphs.markers[line]} ", f"line{line}"), (f"{printable(curve.line.name)} ", ""))
    if view.cursor is None:
        value = one_label(last, unit) if last is not None else "n/a"
        return (*name, (value, "value"))
    found = curve.at(view.cursor)
    if found is None:
        return (*name, ("n/a", "value"))
    elsewhere = "" if found[0] == view.cursor else f" at {exact(found[0])}"
    return (*name, (repr(found[1]), "value"), (elsewhere, "note"))


def _width(piece: Row) -> int:
    return sum(cell_len(text) for text, _ in piece)


def _wrapped(pieces: Sequence[Row], width: int, most: int, glyphs: Glyphs) -> list[Row]:
    """Return the pieces in rows; if there are too many, the last row ends with the number left out."""
    rows: list[list[Row]] = [[]]
    for place, piece in enumerate(pieces):
        left = len(pieces) - place - 1
        used = sum(_width(known) + _GAP for known in rows[-1])
        reserved = _GAP + len(_missing(left, glyphs)) if len(rows) == most and left else 0
        if rows[-1] and used + _width(piece) + reserved > width:
            if len(rows) == most:
                rows[-1].append(((_missing(left + 1, glyphs), "note"),))
                break
            rows.append([])
        rows[-1].append(piece)
    return [_cut(row, width, glyphs) for row in rows]


def _missing(number: int, glyphs: Glyphs) -> str:
    return f"{glyphs.more}{number}"


def _cut(pieces: Sequence[Row], width: int, glyphs: Glyphs) -> Row:
    """Return one row of pieces, never wider than `width`."""
    spans: list[Span] = []
    for piece in pieces:
        spans += [((" " * _GAP if spans else ""), ""), *piece]
    found, left = [], width
    for text, style in spans:
        if cell_len(text) > left:
            found.append((set_cell_size(text, max(0, left - len(glyphs.more))) + glyphs.more[:left], style))
            break
        if text:
            found.append((text, style))
            left -= cell_len(text)
    return tuple(found)


# Larger values are drawn at the border: their differences must not overflow.
_LARGEST = 1e300
# Room on both sides of a scale of percentiles, as a share of it.
_ROOM = 0.05
_SHORT_OF_ROWS = 5


@frozen(kw_only=True)
class Drawing:
    """Drawn plot: rows of equal width. left, width: first column and number of columns of the curves.

    heads: number of rows above the curves. seen: the x values at the left and right border of the curves. span: ends of
    the scale of values, as decimal logarithms on a logarithmic scale.
    """

    rows: tuple[Row, ...]
    heads: int = 0
    left: int = 0
    width: int = 0
    seen: Extent = (0.0, 0.0)
    span: Extent | None = None

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

    newest: see `head`.
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
    span = value_range(guess, [*shown, *behind], view, drawn_from)
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
    return Drawing(rows=rows, heads=len(heads), left=offset, width=num_columns, seen=drawn_from, span=span)


def _sources(curves: Sequence[Curve], view: Viewport, seen: Extent, number: int) -> list[tuple[int, Curve, bool]]:
    """Return (line, curve to draw, whether in the background), in drawing order."""
    above, below = [], []
    for place, curve in enumerate(curves):
        line = curve.line.number(place)
        source = curve.positive if view.log else curve
        if curve.line.dim:
            below.append((MOST_LINES, source, True))
        elif view.smoothing and len(source) > 1:
            above.append((line, source.smoothed(view.smoothing, *seen, number), False))
            below.append((line, source, True))
        elif source.is_dense(*seen, number):
            above.append((line, source.medians(*seen, number), False))
            below.append((line, source, True))
        else:
            above.append((line, source, False))
    return above + below


def value_range(layers: Sequence[CurveColumns], curves: Sequence[Curve], view: Viewport, seen: Extent) -> Extent | None:
    """Return the ends of the scale of values, never equal; None without values. layers: what is drawn of `curves`."""
    if view.fit == "fixed" and view.limits is not None:
        return view.limits
    if view.fit == "percentile":
        found = np.concatenate([(curve.positive if view.log else curve).within(*seen) for curve in curves])
        if len(found):
            low, high = np.percentile(np.log10(found) if view.log else found, PERCENTILES).tolist()
            room = _ROOM * (high - low)
            if math.isfinite(room) and room > 0:
                return low - room, high + room
    return _whole_range(layers, log=view.log)


def _whole_range(layers: Sequence[CurveColumns], *, log: bool) -> Extent | None:
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
