"""The fixes that several diagnostics share: a name that is nearly right, an item that goes, a bracket that is missing.

Fixes are certain: a hint may guess, a fix is written without asking. What rests on a guess has a hint and no fix.
"""

from collections.abc import Iterable

from xtrain.dsl.diagnostics.diagnostic import Fix
from xtrain.dsl.diagnostics.source import SourceText, Span
from xtrain.dsl.diagnostics.suggest import certain


def renamed(span: Span, word: str, candidates: Iterable[str], *, taken: Iterable[str] = ()) -> Fix | None:
    """The one candidate that `word`, which stands at `span`, can have been meant for; None if it is `taken`."""
    meant = certain(word, candidates)
    return Fix(span, meant) if meant is not None and meant not in taken and span.text == word else None


def without(span: Span) -> Fix:
    """An item removed: with the comma that sets it apart, or with its lines if nothing else stands on them."""
    text, start, end = span.source.text, span.start, span.end
    begin, finish = _back(text, start), _forth(text, end)
    alone = text[begin - 1 : begin] in ("", "\n") and text[finish : finish + 1] in ("", "\n")
    if alone:
        return Fix(Span(span.source, begin, min(finish + 1, len(text))), "")
    if text[finish : finish + 1] == ",":
        return Fix(Span(span.source, start, _forth(text, finish + 1)), "")
    if text[begin - 1 : begin] == ",":
        return Fix(Span(span.source, begin - 1, end), "")
    return Fix(span, "")


def closed(source: SourceText, opener: Span, at: int, sign: str) -> Fix:
    """A closing bracket behind the last token, which ends at `at`: on a line of its own if the block has several."""
    if sign != "}":
        return Fix(Span(source, at, at), sign)
    if "\n" not in source.text[opener.end : at]:
        return Fix(Span(source, at, at), " }")
    end = source.text.find("\n", at)
    end = len(source.text) if end < 0 else end
    line = source.line(opener.line)
    return Fix(Span(source, end, end), "\n" + line[: len(line) - len(line.lstrip())] + "}")


def _back(text: str, at: int) -> int:
    """The offset of the blanks that end at `at`."""
    while at and text[at - 1] in " \t":
        at -= 1
    return at


def _forth(text: str, at: int) -> int:
    """The offset behind the blanks that begin at `at`."""
    while at < len(text) and text[at] in " \t":
        at += 1
    return at
