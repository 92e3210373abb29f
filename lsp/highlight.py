"""What each token of a text is, for colours: a block, a setting, a dataset, a constant, a unit, …"""

from collections.abc import Iterator
from typing import Final

from attrs import frozen

from xtrain.dsl.evaluation.functions import FUNCTIONS
from xtrain.dsl.syntax.numbers import UNIT_WORDS
from xtrain.dsl.syntax.tokens import CONSTANTS, STATEMENTS, Token
from xtrain.lsp.analysis import Analysis
from xtrain.lsp.names import Occurrence, occurrences
from xtrain.lsp.place import Place, places
from xtrain.lsp.scope import WORDS

# In the order of the protocol's legend.
KINDS: Final = (
    "keyword", "class", "property", "enumMember", "variable", "namespace", "function", "string", "number", "comment",
    "operator", "event",
)  # fmt: skip
_NAMED: Final = {"let": "variable", "param": "variable", "dataset": "namespace", "function": "function"}
_OPERATORS: Final = (
    "_EQ", "_ARROW", "_TO", "PLUS", "MINUS", "STAR", "SLASH", "DSLASH", "PERCENT", "POW", "_COLON",
)  # fmt: skip


@frozen
class Colored:
    """A colored token. kind: one of `KINDS`, for the characters from `start` to `end`, within a line. defines: it
    defines a name."""

    start: int
    end: int
    kind: str
    defines: bool = False


def colored(analysis: Analysis, path: str) -> list[Colored]:
    """Return the tokens of a file that have a color, in order."""
    words = analysis.words(path)
    if words is None:
        return []
    named = {each.span.start: each for each in occurrences(analysis) if each.span.source.path == path}
    found = [Colored(each.start, each.end, "comment") for each in words.comments]
    seen: Place | None = None
    tokens = [(token, place) for token, place in places(words) if token.start < token.end]
    for number, (token, seen) in enumerate(tokens):
        following = tokens[number + 1][0].type if number + 1 < len(tokens) else "$END"
        found += _parts(token, seen, following, named, words.source.text)
    lines = [piece for each in found for piece in _lines(each, words.source.text)]
    return sorted(lines, key=lambda each: each.start)


def _parts(token: Token, place: Place, following: str, named: dict[int, Occurrence], text: str) -> Iterator[Colored]:
    if token.start in named:
        each = named[token.start]
        yield Colored(each.span.start, each.span.end, _NAMED[each.kind], each.defines)
        return
    if token.type == "NUMBER":
        unit = next((w for w in UNIT_WORDS if token.text.endswith(f" {w}")), "")
        yield Colored(token.start, token.end - len(unit) - (1 if unit else 0), "number")
        if unit:
            yield Colored(token.end - len(unit), token.end, "keyword")
        return
    inside = next((o for o in named.values() if token.start < o.span.start and o.span.end <= token.end), None)
    if inside is not None:  # the dataset in `eval.NAME.loss`
        yield Colored(token.start, inside.span.start, "property")
        yield Colored(inside.span.start, inside.span.end, "namespace")
        return
    kind = _kind(token, place, following)
    if kind is not None:
        yield Colored(token.start, token.end, kind)


def _kind(token: Token, place: Place, following: str) -> str | None:
    item = place.item
    if token.type in (*STATEMENTS.values(), "THEN", "IN") or token.text in CONSTANTS:
        return "keyword"
    if token.type == "STRING" or (token.type == "ERROR" and token.text.startswith('"')):
        return "string"
    if token.type in _OPERATORS:
        return "operator"
    if token.type not in WORDS:
        return None
    if following == "_EQ" or following == "_COLON":
        return "property"
    if following == "LPAR" or token.text in FUNCTIONS:
        return "function"
    if item and item[0].type == "ON" and len(item) == 1:
        return "event"
    if item and item[0].type in ("EVERY", "ON"):
        return "function" if item[-1].type not in WORDS or len(item) == 2 else "enumMember"
    if not item and place.inner.kind == "block":
        return "class"
    return "enumMember"


def _lines(each: Colored, text: str) -> Iterator[Colored]:
    """Yield the pieces of a token on each of its lines."""
    start = each.start
    for line in text[each.start : each.end].split("\n"):
        if line:
            yield Colored(start, start + len(line), each.kind, each.defines)
        start += len(line) + 1
