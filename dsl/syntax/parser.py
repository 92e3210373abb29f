"""The parser: a text into a `File`, with a diagnostic for every item that cannot be read.

lark's LALR parser is fed token by token. At the first token of each item its state is remembered; when a later token
does not fit, the mistake is explained, the state is put back, and a `BROKEN` token takes the place of the whole item.
"""

from typing import Final

from lark.exceptions import UnexpectedToken
from lark.parsers.lalr_interactive_parser import InteractiveParser

from xtrain.dsl.diagnostics.diagnostic import Diagnostics
from xtrain.dsl.diagnostics.source import SourceText
from xtrain.dsl.syntax.layout import layout_tokens
from xtrain.dsl.syntax.lexer import CORRECTED, tokenize
from xtrain.dsl.syntax.syntax_errors import explain
from xtrain.dsl.syntax.tokens import CLOSERS, OPENERS, SEPARATORS, Token
from xtrain.dsl.syntax.tree import Assign, Expression, File, Item
from xtrain.dsl.syntax.tree_builder import grammar
from xtrain.dsl.syntax.unexpected_token import Explanation

MOST_TOKENS: Final = 2**16  # of a spec with all that it includes: a hundred times the longest written by hand
DEEPEST: Final = 50  # blocks inside blocks; the language has two levels, and a text without closing braces any number


def parse_file(source: SourceText, diagnostics: Diagnostics, most: int = MOST_TOKENS) -> File:
    """The syntax tree of a whole text; items that cannot be read are `Broken` in it.

    most: tokens; of a longer text, or one that is nested too deeply, nothing is read.
    """
    tokens = tokenize(source, diagnostics, most=most)
    if _is_excessive(tokens, most, diagnostics):
        return File(source, (), broken=True, unread=True, tokens=len(tokens))
    count = len(tokens)
    tokens, repaired = layout_tokens(tokens, source, diagnostics)
    swallowed = any(t.type == "ERROR" and t.end == len(source.text) for t in tokens)
    items = _Parse(tokens, diagnostics).run()
    return File(source, items, broken=repaired or swallowed, unread=swallowed, tokens=count)


def _is_excessive(tokens: list[Token], most: int, diagnostics: Diagnostics) -> bool:
    """Whether reading a text would take time or memory without bounds, after reporting that."""
    if len(tokens) > most:
        message = f"the spec, with all that it includes, has more than {MOST_TOKENS:,} words and signs"
        diagnostics.error("X120", message, tokens[-1].span, hint="lists of this length belong in a file of their own")
        return True
    depth = 0
    for token in tokens:
        depth += (token.type in OPENERS) - (token.type in CLOSERS) if token.text in "{}" else 0
        depth = max(depth, 0)
        if depth > DEEPEST:
            hint = "the language has only two levels of blocks"
            diagnostics.error("X130", "blocks are nested too deeply", token.span, hint=hint)
            return True
    return False


def parse_expression(source: SourceText, start: int, end: int, diagnostics: Diagnostics) -> Expression | None:
    """The expression that stands between two offsets; None, with diagnostics, if there is none."""
    found = Diagnostics()
    # The grammar has one start rule, so the expression is read as the value of a setting without name.
    before = [Token("NAME", source, start, start), Token("_EQ", source, start, start)]
    tokens, _ = layout_tokens([*before, *tokenize(source, found, start, end)], source, found)
    tokens[-1].start = tokens[-1].end = end
    items = _Parse(tokens, found).run()
    if not found.has_errors and len(items) != 1:
        extra = items[1].span
        found.error("X101", f"unexpected `{extra.text}` behind the value", extra, hint="write one value")
    for item in items:
        if isinstance(item, Assign) and item.body is not None and not found.has_errors:
            hint = "give each of its settings a value of its own, as by `--set optimizer.lr=1e-3`"
            found.error("X101", "a value has no body", item.body.span, hint=hint)
    diagnostics.extend(found)
    match items:
        case [Assign(value=value)] if not found.has_errors:
            return value
    return None


class _Parse:
    def __init__(self, tokens: list[Token], diagnostics: Diagnostics) -> None:
        self.tokens, self.diagnostics = tokens, diagnostics
        # For every item around the current token: its first token's place, and the state before it.
        self.begun: list[tuple[int, InteractiveParser]] = []
        self.reported: int | None = None  # the item whose mistake has been explained

    def run(self) -> tuple[Item, ...]:
        parser = grammar().parse_interactive("")
        self.begun.append((0, parser.copy(deepcopy_values=False)))
        at = 0
        while True:
            token = self.tokens[at]
            if token.starts_item:
                self._begin(at, parser)
            try:
                result = parser.feed_token(token)  # type: ignore[arg-type]
            except UnexpectedToken:
                explanation = self._explain(at, parser)
                if explanation is not None and self._repair(explanation, at, parser):
                    at += explanation.replaces
                    continue
                at, parser = self._give_up(at)
                continue
            if token.type == "$END":
                return result  # type: ignore[return-value]
            at += 1

    def _begin(self, at: int, parser: InteractiveParser) -> None:
        depth = self.tokens[at].depth
        while self.begun and self.tokens[self.begun[-1][0]].depth >= depth:
            self.begun.pop()
        self.begun.append((at, parser.copy(deepcopy_values=False)))

    def _explain(self, at: int, parser: InteractiveParser) -> Explanation | None:
        """Report the token that does not fit, unless its item has been reported or the lexer has done so."""
        item = self._item_of(at)
        token = self.tokens[at]
        by_lexer = token.type == "ERROR" or token.text in CORRECTED
        if by_lexer or (item is not None and item == self.reported):
            return None
        explanation = explain(self.tokens, at, item if item is not None else 0, parser.accepts())
        self.diagnostics.add(explanation.diagnostic)
        self.reported = item
        return explanation

    def _item_of(self, at: int) -> int | None:
        """The place of the first token of the innermost item around a token."""
        depth = self.tokens[at].depth + (self.tokens[at].type in ("RBRACE", "RPAR", "RSQB"))
        for first, _ in reversed(self.begun):
            if self.tokens[first].depth <= depth:
                return first
        return None

    def _repair(self, explanation: Explanation, at: int, parser: InteractiveParser) -> bool:
        """Feed what was meant, if the explanation is sure of it."""
        meant = explanation.meant
        if meant is None or meant not in parser.accepts():
            return False
        token = self.tokens[at]
        parser.feed_token(Token(meant, token.source, token.start, token.start, depth=token.depth))  # type: ignore[arg-type]
        item = self._item_of(at)
        if meant in SEPARATORS and item is not None and token.depth == self.tokens[item].depth:
            token.starts_item = True
            self.reported = None
        return True

    def _give_up(self, at: int) -> tuple[int, InteractiveParser]:
        """Put `BROKEN` in the place of the innermost item: where to go on, and in which state.

        What the layout takes for an item may not be one to the parser, when the text around it is broken as well; then
        the item around it is given up.
        """
        first = self._item_of(at)
        while self.begun[-1][0] != first:
            self.begun.pop()
        while True:
            try:
                return self._replace(at)
            except UnexpectedToken:
                self.begun.pop()

    def _replace(self, at: int) -> tuple[int, InteractiveParser]:
        place, parser = self.begun[-1]
        begin = self.tokens[place]
        end = max(at, place)
        while not self._ends_item(self.tokens[end], begin.depth):
            end += 1
        last = self.tokens[max(end - 1, place)]
        named = begin.type == "NAME" and end > place
        name = begin.text if named else self._defined_name(place)
        broken = Token("BROKEN", begin.source, begin.start, max(last.end, begin.start), name, depth=begin.depth)
        parser = parser.copy(deepcopy_values=False)
        parser.feed_token(broken)  # type: ignore[arg-type]
        return end, parser

    def _defined_name(self, place: int) -> str | None:
        """The name in a broken `let x = …` or `param x = …`."""
        begin, after = self.tokens[place], self.tokens[min(place + 1, len(self.tokens) - 1)]
        return after.text if begin.type in ("LET", "PARAM") and after.type == "NAME" else None

    @staticmethod
    def _ends_item(token: Token, depth: int) -> bool:
        return token.type == "$END" or token.depth < depth or (token.depth == depth and token.type in SEPARATORS)
