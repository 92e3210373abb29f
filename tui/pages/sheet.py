"""Rows of styled text, cut and padded to terminal cells, and lists with a cursor."""

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from attrs import frozen
from rich.cells import cell_len, chop_cells, set_cell_size

from xtrain.text.units import printable

Span = tuple[str, str]
Row = tuple[Span, ...]
ItemT = TypeVar("ItemT")

BLANK: Row = ()


# Signs of the screens; each shows its meaning by its shape, with and without color. The replacements for a terminal
# without UTF-8 are in `board/app.py`.
CUT = "…"
UNDER_WAY, DONE, DEAD = "▶", "✓", "✗"
STUCK_SIGN, SILENT_SIGN, OVER_SIGN = "!", "?", "+"
DOWN, UP, OPEN, FOLDED, CURSOR = "▾", "▴", "▾", "▸", "›"
LINE, WALL, DOT = "─", "│", "·"
SHADES = "·░▒▓█"
"""Shades from lowest to highest."""
EIGHTHS = "▏▎▍▌▋▊▉█"
"""Bars of increasing width; the last fills the cell."""


def row(*spans: Span | str) -> Row:
    """Return a row of spans; a plain text has no style. Texts of other processes cannot control the terminal."""
    pairs = ((span, "") if isinstance(span, str) else span for span in spans)
    return tuple((printable(text).replace("\n", " "), style) for text, style in pairs if text)


def cells(spans: Row) -> int:
    """Return the width of a row."""
    return sum(cell_len(text) for text, _ in spans)


def plain(spans: Row) -> str:
    """Return the text of a row."""
    return "".join(text for text, _ in spans)


def cut(text: str, width: int) -> str:
    """Return `text` in at most `width` cells; the last cell marks omitted text."""
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, width - 1) + CUT if width > 0 else ""


def fit(spans: Row, width: int, fill: str = "") -> Row:
    """Return a row of exactly `width` cells: padded in style `fill`, or cut with a mark."""
    spare = width - cells(spans)
    if spare >= 0:
        return (*spans, (" " * spare, fill)) if spare else spans
    room, fitting = width - cell_len(CUT), []
    for text, style in spans:
        if cell_len(text) >= room:
            fitting.append((set_cell_size(text, max(0, room)) + CUT, style))
            break
        fitting.append((text, style))
        room -= cell_len(text)
    return tuple(fitting) if width > 0 else BLANK


def left(text: str, width: int) -> str:
    """Return exactly `width` cells, the text at the left."""
    return set_cell_size(cut(text, width), width)


def right(text: str, width: int) -> str:
    """Return exactly `width` cells, the text at the right."""
    shown = cut(text, width)
    return " " * (width - cell_len(shown)) + shown


def restyled(spans: Row, style: str) -> Row:
    """Return the same text with one more style everywhere, such as the cursor's."""
    return tuple((text, f"{own} {style}".strip()) for text, own in spans)


def block(rows: Sequence[Row], width: int, height: int) -> list[Row]:
    """Return exactly `height` rows of exactly `width` cells; excess rows are left out."""
    return [fit(rows[index] if index < len(rows) else BLANK, width) for index in range(height)]


def beside(first: Sequence[Row], second: Sequence[Row]) -> list[Row]:
    """Return two blocks of the same height side by side, separated by a wall three cells wide."""
    wall: Span = (f" {WALL} ", "dim")
    return [(*a, wall, *b) for a, b in zip(first, second, strict=True)]


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Return the text in lines of at most `width` cells, broken at blanks and inside words that are too long; later
    lines begin with `indent`."""
    lines: list[str] = []
    for paragraph in printable(text).split("\n"):
        line = indent if lines else ""
        room = max(1, width - cell_len(indent))
        for word in filter(None, (part for whole in paragraph.split() for part in chop_cells(whole, room))):
            gap = "" if line in ("", indent) else " "
            if cell_len(line) + len(gap) + cell_len(word) > width and line not in ("", indent):
                lines.append(line)
                line, gap = indent, ""
            line += gap + word
        lines.append(line)
    return lines


def bar(share: float | None, width: int) -> str:
    """Return a bar of exactly `width` cells, filled by `share`; a positive share is always visible."""
    if share is None or not share > 0:
        return " " * width
    parts = len(EIGHTHS)
    full, rest = divmod(max(1, round(min(share, 1.0) * width * parts)), parts)
    return (EIGHTHS[-1] * full + (EIGHTHS[rest - 1] if rest else "")).ljust(width)


def rule(title: str, width: int, note: str = "") -> Row:
    """Return a heading with a line to the end of the row, and a note at its right."""
    room = width - cell_len(title) - 1 - (cell_len(note) + 1 if note else 0)
    if room < 1 and note:
        return rule(title, width)
    line = LINE * max(0, room)
    return fit(row((title, "title"), " ", (line, "dim"), *((" ", (note, "dim")) if note else ())), width)


def window(count: int, height: int, top: int, cursor: int) -> int:
    """Return the first of `count` lines to show in `height` rows, near `top`, such that line `cursor` is visible."""
    top = min(top, cursor)
    top = max(top, cursor - height + 1)
    return max(0, min(top, count - height))


def joined(parts: Iterable[str]) -> str:
    """Return `a · b · c`, without empty parts."""
    return f" {DOT} ".join(filter(None, parts))


def joined_within(parts: Sequence[str], width: int) -> str:
    """Return the first parts that fit in `width` columns, at least one, as `a · b · c`."""
    parts = list(filter(None, parts))
    while len(parts) > 1 and cell_len(joined(parts)) > width:
        parts.pop()
    return joined(parts)


def labelled(label: str, text: str, width: int, label_width: int, style: str = "") -> list[Row]:
    """Return a wrapped text next to its label."""
    lines = wrapped(text, max(1, width - label_width))
    return [
        row((left("" if number else label, label_width), "dim"), (line, style)) for number, line in enumerate(lines)
    ]


def clipped(rows: Sequence[Row], width: int, height: int) -> list[Row]:
    """Return a block of the first rows; if rows are left out, the last one counts those that `enter` shows."""
    if len(rows) > height:
        rows = [*rows[: height - 1], row((f"{CUT} {len(rows) - height + 1} more lines: enter", "dim"))]
    return block(rows, width, height)


def scrolled(rows: Sequence[Row], scroll: int, width: int, height: int) -> tuple[list[Row], int, int]:
    """Return a page of rows from row `scroll` on, with a last line that counts the rows below; also its actual start,
    and the last possible start."""
    most = max(0, len(rows) - (height - 1))
    scroll = min(scroll, most)
    foot = "esc: back" + (f"  {DOT} {most - scroll} more below" if scroll < most else "")
    return [*block(rows[scroll:], width, height - 1), fit(row((foot, "dim")), width)], scroll, most


@frozen(kw_only=True)
class ListView:
    """The reader's choices. place: index of the row under the cursor; top: the first visible row."""

    place: int = 0
    top: int = 0

    def within(self, count: int, height: int) -> "ListView":
        """Return the view limited to `count` items and `height` rows."""
        place = max(0, min(count - 1, self.place))
        return ListView(place=place, top=window(count, height, self.top, place))


@frozen(kw_only=True)
class ListPage:
    """Drawn rows. rows: at most as many as requested; count: number of items; height: visible rows of items."""

    rows: tuple[Row, ...]
    view: ListView
    count: int
    height: int


def moved(page: ListPage, by: int) -> ListView:
    """Move the cursor by some rows."""
    return ListView(place=max(0, min(page.count - 1, page.view.place + by)), top=page.view.top)


@frozen
class PageColumn(Generic[ItemT]):
    """Column of a table: its title, its width in cells, and the text of an item."""

    title: str
    width: int
    value: Callable[[ItemT], str]


def fitting(columns: Sequence[PageColumn[ItemT]], used: int, width: int) -> tuple[Sequence[PageColumn[ItemT]], int]:
    """Return the first columns that fit next to `used` cells, each after a blank; and the cells used then."""
    for number, column in enumerate(columns):
        if used + 1 + column.width > width:
            return columns[:number], used
        used += 1 + column.width
    return columns, used


def rows_of(items: Sequence[ItemT], view: ListView, room: int, draw: Callable[[ItemT], Row]) -> list[Row]:
    """Return the rows of the items that are visible in `room` rows; the cursor is shown if some are not."""
    rows = [draw(item) for item in items[view.top : view.top + room]]
    if len(items) > room:
        rows[view.place - view.top] = restyled(rows[view.place - view.top], "cursor")
    return rows
