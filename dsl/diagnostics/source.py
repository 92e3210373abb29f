"""`SourceText`, a text with a name, and `Span`, a range of it: what every diagnostic points at."""

from bisect import bisect_right

from attrs import field, frozen


def printable(text: str) -> str:
    """The text with an escape of the language for every character that a terminal would obey instead of showing it."""
    return text if text.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(character: str) -> str:
    return {"\n": "\\n", "\t": "\\t"}.get(character, f"\\u{{{ord(character):x}}}")


@frozen(eq=False)
class SourceText:
    """A text that was read. Two sources are equal only if they are the same object.

    path: as people should see it. order: the place among all sources of one load, for sorting diagnostics.
    included_at: the `include` or `use` that brought it in.
    """

    path: str
    text: str = field(repr=False)
    order: int = 0
    included_at: "Span | None" = field(default=None, repr=False)
    _starts: list[int] = field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        starts = [0, *(place + 1 for place, character in enumerate(self.text) if character == "\n")]
        object.__setattr__(self, "_starts", starts)

    @classmethod
    def from_bytes(cls, path: str, data: bytes, *, order: int = 0, included_at: "Span | None" = None) -> "SourceText":
        """Decode a file: UTF-8, with or without byte-order mark, any line ends. Raises UnicodeDecodeError."""
        text = data.decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
        return cls(path, text, order=order, included_at=included_at)

    def position(self, offset: int) -> tuple[int, int]:
        """Line and column of an offset, both from 1, columns in characters."""
        line = bisect_right(self._starts, offset)
        return line, offset - self._starts[line - 1] + 1

    def line(self, number: int) -> str:
        """The text of a line (from 1) without its end."""
        start = self._starts[number - 1]
        end = self._starts[number] - 1 if number < len(self._starts) else len(self.text)
        return self.text[start:end]

    def line_start(self, number: int) -> int:
        return self._starts[number - 1]

    def span(self, start: int, end: int) -> "Span":
        return Span(self, start, end)

    @property
    def end(self) -> "Span":
        """The empty span behind the last character that is not blank."""
        offset = len(self.text.rstrip())
        return Span(self, offset, offset)


@frozen
class Span:
    """The characters `start` up to, not including, `end` of a source."""

    source: SourceText
    start: int
    end: int

    @property
    def line(self) -> int:
        return self.source.position(self.start)[0]

    @property
    def column(self) -> int:
        return self.source.position(self.start)[1]

    @property
    def end_line(self) -> int:
        return self.source.position(self.end)[0]

    @property
    def end_column(self) -> int:
        """The column behind the last character."""
        return self.source.position(self.end)[1]

    @property
    def text(self) -> str:
        return self.source.text[self.start : self.end]

    def to(self, other: "Span") -> "Span":
        """From the start of this span to the end of `other`, which stands in the same source."""
        return Span(self.source, self.start, other.end)

    def __str__(self) -> str:
        return f"{self.source.path}:{self.line}:{self.column}"
