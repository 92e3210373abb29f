"""Text with several styles, wrapped to the columns of a terminal."""

import shutil
import unicodedata
from collections.abc import Iterable
from functools import cache
from itertools import groupby

from xtrain.lazy_attrs import frozen
from xtrain.text.page import Page
from xtrain.text.units import WIDTH

_SIGNS = {"\n": "⏎", "\t": "⇥", "\x7f": "␡"}


@frozen
class TextPart:
    """A piece of text in one style of a page ("": no style). A `whole` piece is never broken across lines."""

    text: str
    style: str = ""
    whole: bool = False


def width() -> int:
    """Return the terminal's columns, at most the columns of a page; for a pipe, the columns of a page."""
    return max(20, min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns))


def plain(text: str) -> str:
    """Return `text` with terminal control characters made visible."""
    return text if text.isascii() and text.isprintable() else "".join(map(_sign, text))


def flow(page: Page, parts: Iterable[TextPart], columns: int, *, first: str = "", rest: str = "") -> None:
    """Add lines of at most `columns`, broken after a space where possible; `first` and `rest` are margins."""
    line: list[tuple[str, str]] = []
    used, blank = _columns(first), -1
    margin = first

    def end(length: int) -> None:
        nonlocal line, used, blank, margin
        page.line((margin + _painted(page, line[:length])).rstrip())
        line, margin, blank = line[length:], rest, -1
        used = _columns(rest) + sum(_cell(character) for character, _ in line)

    for part in parts:
        for character in part.text:
            breaks = character == " " and not part.whole
            if used + _cell(character) > columns and line:
                end(len(line) if breaks or blank < 0 else blank + 1)
                if breaks:  # an invisible line end
                    continue
            if breaks:
                blank = len(line)
            line.append((character, part.style))
            used += _cell(character)
    end(len(line))


def _painted(page: Page, line: list[tuple[str, str]]) -> str:
    runs = groupby(line, key=lambda pair: pair[1])
    return "".join(page.paint("".join(character for character, _ in run), style) for style, run in runs)


def _columns(text: str) -> int:
    return sum(map(_cell, text))


@cache
def _cell(character: str) -> int:
    """Return the terminal columns of a character."""
    if character.isascii():
        return 1
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


@cache
def _sign(character: str) -> str:
    if character in _SIGNS:
        return _SIGNS[character]
    kind = unicodedata.category(character)
    if kind == "Cc" and ord(character) < 32:
        return chr(0x2400 + ord(character))
    # Directional marks, joiners, separators and unassigned characters are invisible or corrupt the line.
    return f"⟨U+{ord(character):04X}⟩" if kind in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp") else character
