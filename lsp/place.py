"""Where in a spec a cursor stands: the brackets around it, and the tokens of the item before it.

Works on the tokens that the parser sees, so that a text with half a line in it is understood as far as it goes.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

from attrs import field, frozen

from xtrain.dsl.diagnostics.diagnostic import Diagnostics
from xtrain.dsl.diagnostics.source import SourceText
from xtrain.dsl.syntax.layout import layout_tokens
from xtrain.dsl.syntax.lexer import tokenize
from xtrain.dsl.syntax.tokens import CLOSERS, OPENERS, SEPARATORS, Token

BracketKind = Literal["block", "map", "call", "list"]
_ENDS_MAP_OR_BLOCK = ("block", "map")
# Before a `{` these announce a value, as in the parser.
_BEFORE_A_MAP = ("_EQ", "_COLON", "_ARROW", "LPAR", "LSQB")


@frozen
class Bracket:
    """An open bracket. kind: what it holds. head: tokens of its item before the bracket. opener: None for the whole
    text."""

    kind: BracketKind
    head: tuple[Token, ...] = ()
    opener: Token | None = field(default=None, repr=False)


@frozen
class Place:
    """A place in a text. brackets: the enclosing ones, outermost (the whole text) first. item: tokens from the start of
    the innermost item, element or argument up to here. word: the word, number or string that touches the cursor."""

    brackets: tuple[Bracket, ...]
    item: tuple[Token, ...]
    word: Token | None = None

    @property
    def inner(self) -> Bracket:
        return self.brackets[-1]


@frozen
class Words:
    """The tokens of a text. comments: comment tokens, which the parser does not see."""

    source: SourceText
    tokens: tuple[Token, ...]
    comments: tuple[Token, ...]

    @classmethod
    def of(cls, source: SourceText) -> "Words":
        every = tokenize(source, Diagnostics())
        tokens, _ = layout_tokens(every, source, Diagnostics())
        return cls(source, tuple(tokens), tuple(token for token in every if token.type == "COMMENT"))

    def at(self, offset: int) -> Token | None:
        """Return the word, number or string that touches an offset; of two, the one that begins there."""
        touching = [t for t in self.tokens if t.start <= offset <= t.end and t.start < t.end and _is_word(t)]
        return touching[-1] if touching else None

    def in_comment(self, offset: int) -> bool:
        return any(token.start < offset <= token.end for token in self.comments)


def places(words: Words) -> Iterator[tuple[Token, Place]]:
    """Yield every token with its place, in order."""
    brackets: list[Bracket] = [Bracket("block")]
    items: list[list[Token]] = [[]]
    for token in words.tokens:
        if token.type in CLOSERS and len(brackets) > 1:
            brackets.pop()
            items.pop()
        yield token, Place(tuple(brackets), tuple(items[-1]), token)
        _step(token, brackets, items)


def place_at(words: Words, offset: int) -> Place:
    """Return the place of a cursor. A word that the cursor touches is not part of the item."""
    word = words.at(offset)
    limit = offset if word is None else word.start
    brackets: list[Bracket] = [Bracket("block")]
    items: list[list[Token]] = [[]]
    tokens = [token for token in words.tokens if token.start < limit or (token.start == limit and token.end <= limit)]
    for number, token in enumerate(tokens):
        if token.type in CLOSERS and len(brackets) > 1:
            if token.assumed and _still_inside(words.source, brackets[-1], tokens[number:], limit):
                continue
            brackets.pop()
            items.pop()
        if token is not word:
            _step(token, brackets, items)
    return Place(tuple(brackets), tuple(items[-1]), word)


def _step(token: Token, brackets: list[Bracket], items: list[list[Token]]) -> None:
    """Update the stack of brackets and items by a token."""
    item = items[-1]
    if token.type in OPENERS:
        brackets.append(Bracket(_kind(token, brackets[-1], item), tuple(item), token))
        item.append(token)
        items.append([])
    elif token.type == "_COMMA" or (token.type == "_NEWLINE" and brackets[-1].kind in _ENDS_MAP_OR_BLOCK):
        item.clear()
    elif token.type not in SEPARATORS and token.type != "$END":
        item.append(token)


def _kind(opener: Token, around: Bracket, item: Sequence[Token]) -> BracketKind:
    if opener.type == "LSQB":
        return "list"
    if opener.type == "LPAR":
        return "call"
    value = around.kind != "block" or bool(item and item[-1].type in _BEFORE_A_MAP)
    return "map" if value else "block"


def _still_inside(source: SourceText, bracket: Bracket, rest: Sequence[Token], offset: int) -> bool:
    """Return True if an unclosed bracket is still open at an offset: no other token is between, and the cursor's line
    is the opening line or is indented deeper."""
    if bracket.opener is None or any(t.type not in (*SEPARATORS, "$END") and not t.assumed for t in rest):
        return False
    line, _ = source.position(offset)
    if line == bracket.opener.span.line:
        return True
    before = source.text[source.line_start(line) : offset]
    return len(before) > _indent(source, bracket.opener) and (bracket.kind == "block" or not before.strip())


def _indent(source: SourceText, token: Token) -> int:
    line = source.line(token.span.line)
    return len(line) - len(line.lstrip())


def _is_word(token: Token) -> bool:
    return token.text[:1].isalnum() or token.text[:1] in ("_", '"')
