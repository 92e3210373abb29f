"""Diagnostics: messages about spans of source texts, with fixes; their collection, order and rendering."""

import os
import unicodedata
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple, TextIO

from attrs import field

from xtrain.lazy_attrs import frozen


def printable(text: str) -> str:
    """Return the text with language escapes for every character that a terminal would interpret instead of show."""
    return text if text.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(character: str) -> str:
    return {"\n": "\\n", "\t": "\\t"}.get(character, f"\\u{{{ord(character):x}}}")


@frozen(eq=False)
class SourceText:
    """A text that was read. Two sources are equal only if they are the same object.

    path: as shown to people. order: position among all sources of one load, for sorting diagnostics. included_at: the
    `include` or `use` that read it.
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
        """Return line and column of an offset, both from 1, columns in characters."""
        line = bisect_right(self._starts, offset)
        return line, offset - self._starts[line - 1] + 1

    def line(self, number: int) -> str:
        """Return the text of a line (from 1) without its end."""
        start = self._starts[number - 1]
        end = self._starts[number] - 1 if number < len(self._starts) else len(self.text)
        return self.text[start:end]

    def line_start(self, number: int) -> int:
        return self._starts[number - 1]

    def span(self, start: int, end: int) -> "Span":
        return Span(self, start, end)

    @property
    def end(self) -> "Span":
        """Empty span after the last character that is not blank."""
        offset = len(self.text.rstrip())
        return Span(self, offset, offset)


@frozen
class Span:
    """The characters from `start` up to, not including, `end` of a source."""

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
        """Column after the last character."""
        return self.source.position(self.end)[1]

    @property
    def text(self) -> str:
        return self.source.text[self.start : self.end]

    def to(self, other: "Span") -> "Span":
        """Return the span from the start of this one to the end of `other`, in the same source."""
        return Span(self.source, self.start, other.end)

    def __str__(self) -> str:
        return f"{self.source.path}:{self.line}:{self.column}"


Note = tuple[str, Span | None]
MOST_ERRORS = 1000  # per spec; the search then stops


class Fix(NamedTuple):
    """A replacement of `span` by `text` that is certain enough for a tool to apply without asking."""

    span: Span
    text: str


@frozen(kw_only=True)
class Diagnostic:
    """A finding. message: what is wrong, one sentence. hint: what to write instead. notes: explanations, each with its
    place. fix: what `xtrain check --fix` writes."""

    severity: Literal["error", "warning"]
    code: str
    message: str
    span: Span | None
    hint: str | None = None
    notes: tuple[Note, ...] = ()
    fix: Fix | None = None

    @property
    def all_notes(self) -> tuple[Note, ...]:
        """Notes, and for a span of an included file the statements that lead to it."""
        notes = list(self.notes)
        source = self.span.source if self.span else None
        while source is not None and source.included_at is not None:
            word = "used" if source.path.endswith(".py") else "included"
            notes.append((f"`{source.path}` is {word} here", source.included_at))
            source = source.included_at.source
        return tuple(notes)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; lines and columns count from 1, and the end column is exclusive."""
        return {
            "severity": self.severity,
            "code": self.code,
            "message": self.message,
            **_place(self.span),
            "hint": self.hint,
            "notes": [{"message": message, **_place(span)} for message, span in self.all_notes],
            "fix": {**_place(self.fix.span), "replacement": self.fix.text} if self.fix else None,
        }


def _place(span: Span | None) -> dict[str, Any]:
    if span is None:
        return {"path": None, "line": None, "column": None, "end_line": None, "end_column": None}
    return {
        "path": span.source.path,
        "line": span.line,
        "column": span.column,
        "end_line": span.end_line,
        "end_column": span.end_column,
    }


def _order(diagnostic: Diagnostic) -> tuple[int, int, int]:
    span = diagnostic.span
    if span is None:
        return (-1, 0, 0)
    return (span.source.order, span.start, span.end)


class Remediable(Exception):
    """Problem with a remedy. hint: what to do."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class EnoughErrors(Exception):
    """A collection of diagnostics has reached its limit of errors: looking for more would only take time."""


@frozen
class Diagnostics:
    """A collection of diagnostics: iterates in source order (files in order of inclusion), without duplicates.

    most: limit of errors; `add` raises EnoughErrors with the last one.
    """

    most: int | None = None
    _found: dict[Diagnostic, None] = field(factory=dict)  # in order of discovery
    _errors: list[Diagnostic] = field(factory=list)

    def add(self, diagnostic: Diagnostic) -> None:
        if diagnostic in self._found:
            return
        self._found[diagnostic] = None
        if diagnostic.severity == "error":
            self._errors.append(diagnostic)
            if len(self._errors) == self.most:
                raise EnoughErrors

    def extend(self, diagnostics: Iterable[Diagnostic]) -> None:
        for diagnostic in diagnostics:
            self.add(diagnostic)

    def error(
        self,
        code: str,
        message: str,
        span: Span | None,
        *,
        hint: str | None = None,
        notes: Iterable[Note] = (),
        fix: Fix | None = None,
    ) -> None:
        self.add(
            Diagnostic(severity="error", code=code, message=message, span=span, hint=hint, notes=tuple(notes), fix=fix)
        )

    def warning(
        self, code: str, message: str, span: Span | None, *, hint: str | None = None, notes: Iterable[Note] = ()
    ) -> None:
        self.add(Diagnostic(severity="warning", code=code, message=message, span=span, hint=hint, notes=tuple(notes)))

    def __iter__(self) -> Iterator[Diagnostic]:
        return iter(sorted(self._found, key=_order))

    def __len__(self) -> int:
        return len(self._found)

    @property
    def errors(self) -> tuple[Diagnostic, ...]:
        return tuple(sorted(self._errors, key=_order))

    @property
    def warnings(self) -> tuple[Diagnostic, ...]:
        return tuple(d for d in self if d.severity == "warning")

    @property
    def has_errors(self) -> bool:
        return bool(self._errors)

    def render(self, *, color: bool = False) -> str:
        """Return the first `MOST_SHOWN` errors and as many warnings as text, and the number of others; it ends with a
        newline unless there are none."""
        left, lines = {"error": MOST_SHOWN, "warning": MOST_SHOWN}, []
        for diagnostic in self:
            left[diagnostic.severity] -= 1
            if left[diagnostic.severity] >= 0:
                lines.append(render(diagnostic, color=color))
        more = [f"{-count:,} {severity}{'s' if count < -1 else ''}" for severity, count in left.items() if count < 0]
        return "".join(line + "\n" for line in (*lines, *([f"and {' and '.join(more)} more"] if more else [])))


class SpecErrors(Exception):
    """An invalid spec; carries the diagnostics, which are its text as well."""

    def __init__(self, diagnostics: Diagnostics) -> None:
        super().__init__("\n" + diagnostics.render().rstrip())
        self.diagnostics = diagnostics


_STYLES = {"error": "\x1b[1;31m", "warning": "\x1b[1;33m", "note": "\x1b[1;36m", "caret": "\x1b[32m", "bold": "\x1b[1m"}


_RESET = "\x1b[0m"


MOST_SHOWN = 100  # errors, and warnings, shown at once


_LONGEST = 2000  # characters of a message, hint or note, which may contain names and values of a file


_MOST_NOTES = 20


_WIDEST = 160  # columns of a source line; a longer line is cut around the range


_TAB = "    "


def shows_color(stream: TextIO) -> bool:
    """Return True if the stream is a terminal whose user allows color (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def render(diagnostic: Diagnostic, *, color: bool = False) -> str:
    """Render one diagnostic in the format of the language's definition, without a final newline.

    Contents of files, such as keys, names and lines, may contain any character: all are made printable here.
    """
    severity, span = diagnostic.severity, diagnostic.span
    place = _paint(f"{printable(str(span))}: ", "bold", color) if span else ""
    title = _paint(f"{severity}[{diagnostic.code}]", severity, color)
    lines = [f"{place}{title}: {_paint(_shown(diagnostic.message), 'bold', color)}"]
    hint = _shown(diagnostic.hint or "")
    shown = _excerpt(span, hint, color) if span else []
    lines += shown
    if hint and not shown:
        lines.append(f"{_paint('hint', 'note', color)}: {hint}")
    notes = diagnostic.all_notes
    for message, place_of_note in notes[:_MOST_NOTES]:
        where = f" ({place_of_note})" if place_of_note else ""
        lines.append(f"{_paint('note', 'note', color)}: {_shown(message + where)}")
        if place_of_note:
            lines += _excerpt(place_of_note, "", color)
    if len(notes) > _MOST_NOTES:
        lines.append(f"{_paint('note', 'note', color)}: and {len(notes) - _MOST_NOTES:,} more notes")
    return "\n".join(lines)


def _shown(text: str) -> str:
    return printable(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…")


def _excerpt(span: Span, hint: str, color: bool) -> list[str]:
    """Return the first line of a span with carets under it; nothing for a source without text."""
    if not span.source.text.strip():
        return []
    line = span.source.line(span.line)
    start = span.column - 1
    end = span.end_column - 1 if span.end_line == span.line else len(line.rstrip())
    end = max(end, start + 1)
    before, marked, after = line[:start], line[start:end], line[end:]
    if len(line) > _WIDEST:
        before, marked, after = _cut(before, marked, after)
    before, marked, after = (printable(part.replace("\t", _TAB)) for part in (before, marked, after))
    shown = (before + marked + after).rstrip()
    carets = "^" * max(1, _width(marked))
    tail = f" {hint}" if hint else ""
    return [
        f"{span.line:>5} | {shown}".rstrip(),
        f"      | {' ' * _width(before)}{_paint(carets + tail, 'caret', color)}",
    ]


def _cut(before: str, marked: str, after: str) -> tuple[str, str, str]:
    """Drop text far from the range, so that the carets stay in view."""
    if len(marked) > _WIDEST // 2:
        marked, after = marked[: _WIDEST // 2], "…"
    room = (_WIDEST - len(marked)) // 2
    if len(before) > room:
        before = "…" + before[-room:]
    if len(after) > room:
        after = after[:room] + "…"
    return before, marked, after


def _width(text: str) -> int:
    """Return the terminal columns of a text: wide characters take two, combining ones none."""
    columns = 0
    for character in text:
        if unicodedata.combining(character):
            continue
        columns += 2 if unicodedata.east_asian_width(character) in "WF" else 1
    return columns


def _paint(text: str, style: str, color: bool) -> str:
    return f"{_STYLES[style]}{text}{_RESET}" if color else text
