"""Offsets of a text, and the lines and columns that an editor counts in its own units."""

import re
from typing import Final, NamedTuple

from xtrain.dsl.diagnostics.source import SourceText, Span

# Encoding of the protocol → code units of a character.
_UNITS: Final = {
    "utf-8": lambda c: len(c.encode(errors="surrogatepass")),
    "utf-16": lambda c: 2 if ord(c) > 0xFFFF else 1,
    "utf-32": lambda c: 1,
}
_LINE_END: Final = re.compile(r"\r\n|\r|\n")  # the protocol's line ends: `str.splitlines` has more


class TextPosition(NamedTuple):
    """A position of the protocol: line and character from 0, the character in units of the encoding."""

    line: int
    character: int


class Extent(NamedTuple):
    """A range from a position up to, but not including, another."""

    start: TextPosition
    end: TextPosition


class Positions:
    """Converts between offsets and positions. encoding: `utf-8`, `utf-16` or `utf-32`."""

    def __init__(self, encoding: str = "utf-16") -> None:
        self.units = _UNITS[encoding]

    def position(self, source: SourceText, offset: int) -> TextPosition:
        """Return the position of an offset."""
        line, column = source.position(offset)
        start = source.line_start(line)
        return TextPosition(line - 1, self.width(source.text[start : start + column - 1]))

    def extent(self, span: Span) -> Extent:
        """Return the extent of a span."""
        return Extent(self.position(span.source, span.start), self.position(span.source, span.end))

    def width(self, text: str) -> int:
        """Return the width of a text in protocol units."""
        return len(text) if text.isascii() else sum(map(self.units, text))

    def offset(self, source: SourceText, position: tuple[int, int]) -> int:
        """Return the offset of a position; past the end of a line or of the text, that end."""
        line, character = position
        if line >= source.position(len(source.text))[0]:
            return len(source.text)
        text = source.line(line + 1)
        column = 0
        while column < len(text) and character > 0:
            character -= self.units(text[column])
            column += 1
        return source.line_start(line + 1) + column

    def replaced(self, text: str, start: tuple[int, int], end: tuple[int, int], new: str) -> str:
        """Return the text with `new` instead of the text between two positions; line ends may be of any kind."""
        ends = [(match.start(), match.end()) for match in _LINE_END.finditer(text)]
        first, last = (self._place(text, ends, each) for each in (start, end))
        return text[:first] + new + text[max(first, last) :]

    def _place(self, text: str, ends: list[tuple[int, int]], position: tuple[int, int]) -> int:
        """Return the offset of a position. ends: for each line but the last, its end and the start of the next line."""
        line, character = position
        if line > len(ends):
            return len(text)
        place = ends[line - 1][1] if line else 0
        stop = ends[line][0] if line < len(ends) else len(text)
        while place < stop and character > 0:
            character -= self.units(text[place])
            place += 1
        return place
