"""Diagnostics as text: the place, the line, carets under the range, a hint behind them, notes below."""

import os
import unicodedata
from typing import TextIO

from .diagnostics import Diagnostic
from .source import Span

_STYLES = {"error": "\x1b[1;31m", "warning": "\x1b[1;33m", "note": "\x1b[1;36m", "caret": "\x1b[32m", "bold": "\x1b[1m"}
_RESET = "\x1b[0m"
_WIDEST = 160  # columns of a source line that are shown; a longer line is cut around the range
_TAB = "    "


def shows_color(stream: TextIO) -> bool:
    """Whether a stream is a terminal whose user has not asked for plain text (NO_COLOR)."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def render(diagnostic: Diagnostic, *, color: bool = False) -> str:
    """One diagnostic in the format of the language's definition, without a final newline."""
    severity, span = diagnostic.severity, diagnostic.span
    place = _paint(f"{span}: ", "bold", color) if span else ""
    title = _paint(f"{severity}[{diagnostic.code}]", severity, color)
    lines = [f"{place}{title}: {_paint(diagnostic.message, 'bold', color)}"]
    shown = _excerpt(span, diagnostic.hint, color) if span else []
    lines += shown
    if diagnostic.hint and not shown:
        lines.append(f"{_paint('hint', 'note', color)}: {diagnostic.hint}")
    for message, place_of_note in diagnostic.all_notes:
        where = f" ({place_of_note})" if place_of_note else ""
        lines.append(f"{_paint('note', 'note', color)}: {message}{where}")
        if place_of_note:
            lines += _excerpt(place_of_note, None, color)
    return "\n".join(lines)


def _excerpt(span: Span, hint: str | None, color: bool) -> list[str]:
    """The first line of a span and the carets under it; nothing for a source without text."""
    if not span.source.text.strip():
        return []
    line = span.source.line(span.line)
    start = span.column - 1
    end = span.end_column - 1 if span.end_line == span.line else len(line.rstrip())
    end = max(end, start + 1)
    before, marked, after = line[:start], line[start:end], line[end:]
    if len(line) > _WIDEST:
        before, marked, after = _cut(before, marked, after)
    shown = (before + marked + after).replace("\t", _TAB).rstrip()
    carets = "^" * max(1, _width(marked))
    tail = f" {hint}" if hint else ""
    return [
        f"{span.line:>5} | {shown}".rstrip(),
        f"      | {' ' * _width(before)}{_paint(carets + tail, 'caret', color)}",
    ]


def _cut(before: str, marked: str, after: str) -> tuple[str, str, str]:
    """Leave out what is far from the range, so that the carets stay in view."""
    if len(marked) > _WIDEST // 2:
        marked, after = marked[: _WIDEST // 2], "…"
    room = (_WIDEST - len(marked)) // 2
    if len(before) > room:
        before = "…" + before[-room:]
    if len(after) > room:
        after = after[:room] + "…"
    return before, marked, after


def _width(text: str) -> int:
    """Columns of a terminal that a text takes: wide characters two, combining ones none."""
    columns = 0
    for character in text:
        if character == "\t":
            columns += len(_TAB)
        elif unicodedata.combining(character):
            continue
        else:
            columns += 2 if unicodedata.east_asian_width(character) in "WF" else 1
    return columns


def _paint(text: str, style: str, color: bool) -> str:
    return f"{_STYLES[style]}{text}{_RESET}" if color else text
