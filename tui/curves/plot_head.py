"""What stands above a plot: its name, what was chosen, and the value of each line."""

from collections.abc import Sequence

import numpy as np
from rich.cells import cell_len, set_cell_size

from xtrain.tui.curves.canvas import MOST_LINES, Glyphs, Row, Span
from xtrain.tui.curves.curve import Curve
from xtrain.tui.curves.ticks import Unit, one_label
from xtrain.tui.curves.viewport import Viewport
from xtrain.tui.words import printable

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
        _value(line, curve, last, view, unit, len(curves), glyphs)
        for line, (curve, last) in enumerate(zip(curves, lasts, strict=False))
    ]
    if more > 0:
        pieces.append(((f"{more} more lines not drawn", "note"),))
    return _wrapped([piece for piece in pieces if _width(piece)], width, max(1, height // 4), glyphs)


def exact(value: float) -> str:
    """Return a number with all its digits, as in the file; whole numbers with separators between thousands."""
    whole = abs(value) < 2**53 and value == int(value) if np.isfinite(value) else False
    return f"{int(value):,}" if whole else repr(value)


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
