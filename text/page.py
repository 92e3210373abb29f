"""Pages of plain text: headings, aligned tables, wrapped lines, and color if the terminal supports it."""

from collections.abc import Sequence
from textwrap import wrap
from typing import Final

from xtrain.lazy_attrs import frozen
from xtrain.text.printing import WHOLE
from xtrain.text.units import WIDTH

LONGEST = 119  # lines of a page by default
_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


@frozen(kw_only=True)
class Detail:
    """Extent of a plan page.

    full: everything. wraps: descriptions are wrapped instead of cut. rows: limit of every table.
    """

    full: bool = False
    wraps: bool = True
    rows: int = 24

    def most(self, rows: int) -> int:
        """Return the number of rows shown of a table with `rows` rows."""
        return 10**9 if self.full else min(rows, self.rows)


FULL: Final = Detail(full=True)
DETAILS: Final = (Detail(), Detail(wraps=False), *(Detail(wraps=False, rows=rows) for rows in (14, 11, 9, 7, 5, 3, 1)))


class Page:
    """Lines of at most WIDTH columns. Without `color` no escape code is written."""

    def __init__(self, *, color: bool = False) -> None:
        self._color = color
        self._lines: list[str] = []

    def __str__(self) -> str:
        return "\n".join(self._lines).rstrip("\n") + "\n"

    @property
    def height(self) -> int:
        """Number of lines, without empty ones at the end."""
        return str(self).count("\n")

    def paint(self, text: str, style: str) -> str:
        return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if self._color and style and text else text

    def line(self, text: str = "", style: str = "") -> None:
        self._lines.append(self.paint(text, style) if text else "")

    def heading(self, title: str, remark: str = "") -> None:
        """Add an empty line and the title of a section with a remark next to it."""
        self.line()
        room = WIDTH - len(title) - 2
        self._lines.append(self.paint(title, "bold") + (f"  {self.paint(clip(remark, room), 'dim')}" if remark else ""))

    def described(self, rows: Sequence[tuple[str, str]], *, wraps: bool = True) -> None:
        """Add names next to descriptions, which are wrapped or cut at a word."""
        width = max((len(name) for name, _ in rows), default=0)
        for name, does in rows:
            first = f"  {name.ljust(width)}  "
            if wraps:
                self.wrapped(does, first=first, rest=" " * (width + 4))
            else:
                self.line((first + shorten(does, WIDTH - len(first))).rstrip())

    def more(self, count: int, part: str) -> None:
        """Add that `count` rows are left out and which part of the page has them."""
        if count > 0:
            self.line(f"  and {count:,} more: --part {part}", "dim")

    def wrapped(self, text: str, *, first: str = "  ", rest: str = "  ", style: str = "") -> None:
        """Add text, wrapped; `first` and `rest` are the margins."""
        room = WIDTH - max(len(first), len(rest))
        for number, part in enumerate(wrap(text, room, break_on_hyphens=False) or [""]):  # names and paths stay whole
            self._lines.append((first if number == 0 else rest) + self.paint(part, style))

    def table(self, rows: Sequence[Sequence[str]], *, align: str = "", styles: Sequence[str] = ()) -> None:
        """Add columns as wide as their widest cell, `align` has a letter per column (`<` or `>`); the last column is
        shortened."""
        if not rows:
            return
        count = len(rows[0])
        align = align.ljust(count, "<")
        widths = [max(len(row[column]) for row in rows) for column in range(count)]
        if not WHOLE.get():
            widths[-1] = min(widths[-1], max(WIDTH - 2 - sum(widths[:-1]) - 2 * (count - 1), 7))
        for row in rows:
            cells = []
            for column, cell in enumerate(row):
                shown = clip(cell, widths[column])
                shown = shown.rjust(widths[column]) if align[column] == ">" else shown.ljust(widths[column])
                cells.append(self.paint(shown, styles[column] if column < len(styles) else ""))
            self._lines.append(("  " + "  ".join(cells)).rstrip())


def shorten(text: str, width: int) -> str:
    """Return `text` in at most `width` columns, cut at the end of a word; whole if WHOLE is set."""
    if len(text) <= width or WHOLE.get():
        return text
    cut = text[: max(width - 1, 0)]
    return (cut.rpartition(" ")[0].rstrip(" ,;:·") or cut) + "…"


def clip(text: str, width: int) -> str:
    """Return `text` in at most `width` columns; whole if WHOLE is set."""
    return text if len(text) <= width or WHOLE.get() else text[: max(width - 1, 0)] + "…"
