"""`xtrain fmt`: spacing, indentation and commas belong to the formatter, line breaks and comments to the author.

A bracket pair with a line break directly inside is opened up: its content is indented by two blanks and the bracket
closes on a line of its own. Trailing commas are removed from blocks and maps and added to lists and calls. At most one
blank line in a row is kept.
"""

from typing import Any

from attrs import fields

from xtrain.dsl.diagnostics.diagnostic import MOST_ERRORS, Diagnostics, EnoughErrors, SourceText, SpecErrors
from xtrain.dsl.syntax.layout import layout_tokens
from xtrain.dsl.syntax.lexer import spelling, tokenize
from xtrain.dsl.syntax.parser import parse_file
from xtrain.dsl.syntax.tree import CLOSERS, OPENERS, SyntaxNode, Token

_OPERATORS = ("PLUS", "MINUS", "STAR", "SLASH", "DSLASH", "PERCENT", "POW")
_UNARY_AFTER = frozenset({*OPENERS, *_OPERATORS, "_EQ", "_COLON", "_COMMA", "_ARROW", "_TO", "EVERY"})

_CALLED = ("NAME", "HUB")
_NO_GAP_BEHIND = ("LPAR", "LSQB", "_DOT", "_TO")
_NO_GAP_BEFORE = ("RPAR", "RSQB", "_DOT", "_TO", "_COMMA", "_COLON")


class FormatFault(Exception):
    """The formatter would have changed the meaning of a spec: a bug of the formatter, never of the spec."""


def format_source(source: SourceText) -> str:
    """Return the formatted text. Raises SpecErrors for syntax errors, and FormatFault rather than change the
    meaning."""
    diagnostics = Diagnostics(most=MOST_ERRORS)
    try:
        before = parse_file(source, diagnostics)
    except EnoughErrors:
        raise SpecErrors(diagnostics) from None
    if diagnostics.has_errors:
        raise SpecErrors(diagnostics)
    tokens = tokenize(source, diagnostics)
    layout_tokens(tokens, source, diagnostics)  # distinguishes keywords from names
    text = _Printer(tokens).run()
    written = SourceText(source.path, text)
    after = parse_file(written, diagnostics)
    if diagnostics.has_errors or not same(before.items, after.items) or comments(source) != comments(written):
        raise FormatFault(source.path)
    return text


def comments(source: SourceText) -> list[str]:
    """Return all comments in order, without trailing blanks."""
    return [token.text.rstrip() for token in tokenize(source, Diagnostics()) if token.type == "COMMENT"]


def same(left: Any, right: Any) -> bool:
    """Return True if two syntax trees are equal except for places. `==` would recurse as deep as a text may nest."""
    pairs = [(left, right)]
    while pairs:
        one, other = pairs.pop()
        if type(one) is not type(other):
            return False
        if isinstance(one, tuple):
            if len(one) != len(other):
                return False
            pairs += zip(one, other, strict=True)
        elif isinstance(one, SyntaxNode):
            pairs += [(getattr(one, a.name), getattr(other, a.name)) for a in fields(type(one)) if a.eq]
        elif one != other:
            return False
    return True


class _Printer:
    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.opened_up: set[int] = set()  # places of both brackets of a pair that spans lines
        self.comma_behind: set[int] = set()
        self.dropped: set[int] = set()
        self._plan()
        self.lines: list[str] = []
        self.line = ""
        self.indent = 0
        self.blank = False  # a blank line is due

    def run(self) -> str:
        before: Token | None = None  # on the current line
        unary = False
        for place, token in enumerate(self.tokens):
            if place in self.dropped:
                continue
            if token.type == "_NEWLINE":
                if not self.line:
                    self.blank = bool(self.lines) and not self.lines[-1].endswith(("{", "(", "["))
                self._end_line()
                before = None
                continue
            if token.type in CLOSERS and place in self.opened_up:
                self._end_line()
                self.indent -= 1
                self.blank, before = False, None
            text = spelling(token.text) if token.type == "NUMBER" else token.text.rstrip()
            self._write(("" if before is None or unary else _gap(before, token)) + text)
            unary = token.type == "MINUS" and self._previous(place) in _UNARY_AFTER
            before = token
            if place in self.comma_behind:
                self.line += ","
            if token.type in OPENERS and place in self.opened_up:
                self._end_line()
                self.indent += 1
                before = None
        self._end_line()
        return "\n".join(self.lines) + ("\n" if self.lines else "")

    def _previous(self, place: int) -> str:
        """Return the type of the last token before a place that is not a line end or comment; an opener at the
        start."""
        while place:
            place -= 1
            if self.tokens[place].type not in ("_NEWLINE", "COMMENT"):
                return self.tokens[place].type
        return "LPAR"

    def _write(self, text: str) -> None:
        if not self.line:
            if self.blank:
                self.lines.append("")
                self.blank = False
            self.line = "  " * self.indent
        self.line += text

    def _end_line(self) -> None:
        if self.line:
            self.lines.append(self.line)
            self.line = ""

    # What is to change, decided before anything is printed ------------------------------------------------------------

    def _plan(self) -> None:
        opened: list[int] = []
        for place, token in enumerate(self.tokens):
            if token.type in OPENERS:
                opened.append(place)
            elif token.type in CLOSERS:
                self._pair(opened.pop(), place)
            elif token.type == "_COMMA" and (not opened or self.tokens[opened[-1]].type == "LBRACE"):
                following = self.tokens[place + 1].type if place + 1 < len(self.tokens) else "_NEWLINE"
                if following in ("_NEWLINE", "COMMENT", "RBRACE"):
                    self.dropped.add(place)

    def _pair(self, first: int, last: int) -> None:
        """Decide whether a pair of brackets is opened up, and whether its last comma is added or removed."""
        inner = self.tokens[first + 1 : last]
        solid = [place for place in range(first + 1, last) if self.tokens[place].type not in ("_NEWLINE", "COMMENT")]
        comments = any(token.type == "COMMENT" for token in inner)
        if not solid and not comments:
            self.dropped.update(range(first + 1, last))
            return
        across = self._breaks(first, last)
        if across:
            self.opened_up.update((first, last))
        if self.tokens[first].type == "LBRACE" or not solid or self._is_group(first):
            return
        ends_with_comma = self.tokens[solid[-1]].type == "_COMMA"
        if across and not ends_with_comma:
            self.comma_behind.add(solid[-1])
        if not across and ends_with_comma:
            self.dropped.add(solid[-1])

    def _breaks(self, first: int, last: int) -> bool:
        """Return True if a line ends directly between the brackets, outside nested brackets."""
        depth = 0
        for token in self.tokens[first + 1 : last]:
            depth += (token.type in OPENERS) - (token.type in CLOSERS)
            if depth == 0 and token.type in ("_NEWLINE", "COMMENT"):
                return True
        return False

    def _is_group(self, place: int) -> bool:
        """Return True if a `(` only groups an expression, where no comma may follow."""
        return self.tokens[place].type == "LPAR" and self._previous(place) not in _CALLED


def _gap(before: Token, token: Token) -> str:
    """Return the blanks between two tokens of a line."""
    left, right = before.type, token.type
    if right == "COMMENT":
        return "  "
    if left in _NO_GAP_BEHIND or right in _NO_GAP_BEFORE:
        return ""
    if (left, right) == ("LBRACE", "RBRACE") or (left in _CALLED and right == "LPAR"):
        return ""
    return " "
