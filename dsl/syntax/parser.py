"""Parser: a text into a `File`, with a diagnostic for every unreadable item.

A method of `TreeBuilder` builds the node of every rule of `grammar.lark`.
"""

from functools import partial
from typing import Any, Final

from xtrain.dsl.diagnostics.diagnostic import Diagnostics, SourceText
from xtrain.dsl.syntax import tree as s
from xtrain.dsl.syntax.layout import layout_tokens
from xtrain.dsl.syntax.lexer import CORRECTED, tokenize
from xtrain.dsl.syntax.syntax_errors import Explanation, explain
from xtrain.dsl.syntax.table import Parse, UnfitToken
from xtrain.dsl.syntax.tree import CLOSERS, OPENERS, SEPARATORS, Assign, Expression, File, Item, Token

Parts = list[Any]


def _name(token: Token) -> s.Name:
    return s.Name(token.span, token.text)


def _label(token: Token) -> s.Label:
    match token.type:
        case "NAME":
            return _name(token)
        case "STRING":
            return s.String(token.span, token.value)
        case "NUMBER":
            return s.Number(token.span, token.value)
        case _:
            return s.FixedWord(token.span, token.text)


class TreeBuilder:
    """Builds the syntax tree, one method per rule; `parts` are the named tokens and the nodes of the rule, in order."""

    def items(self, parts: Parts) -> tuple[s.Item, ...]:
        return tuple(parts)

    def file(self, parts: Parts) -> tuple[s.Item, ...]:
        return parts[0] if parts and parts[0] is not None else ()

    def assign(self, parts: Parts) -> s.Assign:
        name, value = parts
        return s.Assign(name.span.to(value.span), _name(name), value)

    def settled(self, parts: Parts) -> s.Assign:
        name, word, body = parts
        return s.Assign(name.span.to(body.span), _name(name), s.Reference(word.span, (word.text,)), body)

    def vary(self, parts: Parts) -> s.Vary:
        *names, _, value = parts
        span = names[0].span.to(names[-1].span)
        name = s.Name(span, ".".join(token.text for token in names))
        return s.Vary(span.to(value.span), name, value)

    def label(self, parts: Parts) -> s.Label:
        return _label(parts[0])

    def called(self, parts: Parts) -> s.Label:
        return self.call(parts)

    def body(self, parts: Parts) -> s.Body:
        opener, closer = parts[0], parts[-1]
        items = parts[1] if len(parts) == 3 and parts[1] is not None else ()
        return s.Body(opener.span.to(closer.span), items, broken=closer.assumed)

    def block(self, parts: Parts) -> s.Block:
        kind, *rest = parts
        body = rest.pop() if rest and isinstance(rest[-1], s.Body) else None
        end = body.span if body else rest[-1].span if rest else kind.span
        return s.Block(kind.span.to(end), _name(kind), tuple(rest), body)

    def action(self, parts: Parts) -> s.Block:
        if len(parts) < 2 or not isinstance(parts[1], tuple):
            return self.block(parts)
        kind, (closer, arguments), *body = parts
        span = kind.span.to(body[0].span if body else closer.span)
        return s.Block(span, _name(kind), (), body[0] if body else None, arguments)

    def actions(self, parts: Parts) -> tuple[s.Block, ...]:
        return tuple(part for part in parts if isinstance(part, s.Block))

    def let(self, parts: Parts) -> s.Let:
        word, name, value = parts
        return s.Let(word.span.to(value.span), _name(name), value)

    def param(self, parts: Parts) -> s.Param:
        word, name, value = parts
        return s.Param(word.span.to(value.span), _name(name), value)

    def include(self, parts: Parts) -> s.Include:
        return s.Include(parts[0].span.to(parts[1].span), parts[1])

    def use(self, parts: Parts) -> s.Use:
        return s.Use(parts[0].span.to(parts[1].span), parts[1])

    def every(self, parts: Parts) -> s.Every:
        word, period, actions = parts
        return s.Every(word.span.to(actions[-1].span), period, actions)

    def on(self, parts: Parts) -> s.On:
        word, event, *arguments, actions = parts
        given = arguments[0][1] if arguments else ()
        return s.On(word.span.to(actions[-1].span), _name(event), given, actions)

    def broken(self, parts: Parts) -> s.Broken:
        return s.Broken(parts[0].span, parts[0].value)

    # Expressions ------------------------------------------------------------------------------------------------------

    def chain(self, parts: Parts) -> s.ChainExpression:
        return s.ChainExpression(parts[0].span.to(parts[-1].span), tuple(parts))

    def interval(self, parts: Parts) -> s.IntervalExpression:
        low, high = parts
        return s.IntervalExpression(low.span.to(high.span), low, high)

    def binary(self, parts: Parts) -> s.Binary:
        left, operator, right = parts
        return s.Binary(left.span.to(right.span), operator.text, left, right)

    def negative(self, parts: Parts) -> s.Negative:
        return s.Negative(parts[0].span.to(parts[1].span), parts[1])

    def group(self, parts: Parts) -> s.Expression:
        return s.Unread(parts[1].span) if parts[2].assumed else parts[1]

    def number(self, parts: Parts) -> s.Number:
        return s.Number(parts[0].span, parts[0].value)

    def string(self, parts: Parts) -> s.String:
        return s.String(parts[0].span, parts[0].value)

    def constant(self, parts: Parts) -> s.FixedWord:
        return s.FixedWord(parts[0].span, parts[0].text)

    def reference(self, parts: Parts) -> s.Reference:
        return s.Reference(parts[0].span.to(parts[-1].span), tuple(part.text for part in parts))

    def call(self, parts: Parts) -> s.Call | s.Unread:
        name, (closer, arguments) = parts
        span = name.span.to(closer.span)
        return s.Unread(span) if closer.assumed else s.Call(span, _name(name), arguments)

    def arguments(self, parts: Parts) -> tuple[Token, tuple[s.Argument, ...]]:
        return parts[-1], tuple(part for part in parts if isinstance(part, s.Argument))

    def argument(self, parts: Parts) -> s.Argument:
        return s.Argument(parts[0].span, None, parts[0])

    def keyword(self, parts: Parts) -> s.Argument:
        name, value = parts
        return s.Argument(name.span.to(value.span), _name(name), value)

    def list(self, parts: Parts) -> s.Expression:
        if parts[-1].assumed:
            return s.Unread(parts[0].span.to(parts[-1].span))
        return s.ListOf(parts[0].span.to(parts[-1].span), tuple(parts[1:-1]))

    def map(self, parts: Parts) -> s.Expression:
        if parts[-1].assumed:
            return s.Unread(parts[0].span.to(parts[-1].span))
        return s.Map(parts[0].span.to(parts[-1].span), tuple(parts[1:-1]))

    def entry(self, parts: Parts) -> s.Entry:
        key, value = parts
        name = _name(key) if isinstance(key, Token) else key
        return s.Entry(name.span.to(value.span), name, value)


MOST_TOKENS: Final = 2**16  # for a spec with all its includes: a hundred times the longest written by hand
DEEPEST: Final = 50  # nested blocks; the language has two levels, but a text without closing braces may have any number


def parse_file(source: SourceText, diagnostics: Diagnostics, most: int = MOST_TOKENS) -> File:
    """Return the syntax tree of a whole text, with unreadable items as `Broken`.

    most: limit of tokens; nothing is read of a longer text, or of one that is nested too deeply.
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
    """Return True, with a report, if reading a text could take unbounded time or memory."""
    if len(tokens) > most:
        message = f"the spec, with all its includes, has more than {MOST_TOKENS:,} tokens"
        diagnostics.error("X120", message, tokens[-1].span, hint="move lists of this length to a separate file")
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
    """Return the expression between two offsets; None, with diagnostics, if there is none."""
    found = Diagnostics()
    # The grammar has one start rule, so the expression is read as the value of an unnamed setting.
    before = [Token("NAME", source, start, start), Token("_EQ", source, start, start)]
    tokens, _ = layout_tokens([*before, *tokenize(source, found, start, end)], source, found)
    tokens[-1].start = tokens[-1].end = end
    items = _Parse(tokens, found).run()
    if not found.has_errors and len(items) != 1:
        extra = items[1].span
        found.error("X101", f"unexpected `{extra.text}` after the value", extra, hint="write one value")
    for item in items:
        if isinstance(item, Assign) and item.body is not None and not found.has_errors:
            hint = "set each of its settings separately, as in `--set optimizer.lr=1e-3`"
            found.error("X101", "a value has no body", item.body.span, hint=hint)
    diagnostics.extend(found)
    match items:
        case [Assign(value=value)] if not found.has_errors:
            return value
    return None


class _Parse:
    def __init__(self, tokens: list[Token], diagnostics: Diagnostics) -> None:
        self.tokens, self.diagnostics = tokens, diagnostics
        # For every item around the current token: the place of its first token, and the parser state before it.
        self.begun: list[tuple[int, Parse]] = []
        self.reported: int | None = None  # the item whose mistake has been explained

    def run(self) -> tuple[Item, ...]:
        parser = Parse(partial(getattr, TreeBuilder()))
        self.begun.append((0, parser.copy()))
        at = 0
        while True:
            token = self.tokens[at]
            if token.starts_item:
                self._begin(at, parser)
            try:
                result = parser.feed(token)
            except UnfitToken:
                explanation = self._explain(at, parser)
                if explanation is not None and self._repair(explanation, at, parser):
                    at += explanation.replaces
                    continue
                at, parser = self._give_up(at)
                continue
            if token.type == "$END":
                return result
            at += 1

    def _begin(self, at: int, parser: Parse) -> None:
        depth = self.tokens[at].depth
        while self.begun and self.tokens[self.begun[-1][0]].depth >= depth:
            self.begun.pop()
        self.begun.append((at, parser.copy()))

    def _explain(self, at: int, parser: Parse) -> Explanation | None:
        """Report the token that does not fit, unless its item or the lexer has reported already."""
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
        """Return the place of the first token of the innermost item around a token."""
        depth = self.tokens[at].depth + (self.tokens[at].type in ("RBRACE", "RPAR", "RSQB"))
        for first, _ in reversed(self.begun):
            if self.tokens[first].depth <= depth:
                return first
        return None

    def _repair(self, explanation: Explanation, at: int, parser: Parse) -> bool:
        """Insert the token that was meant, if the explanation is certain of it."""
        meant = explanation.meant
        if meant is None or meant not in parser.accepts():
            return False
        token = self.tokens[at]
        parser.feed(Token(meant, token.source, token.start, token.start, depth=token.depth))
        item = self._item_of(at)
        if meant in SEPARATORS and item is not None and token.depth == self.tokens[item].depth:
            token.starts_item = True
            self.reported = None
        return True

    def _give_up(self, at: int) -> tuple[int, Parse]:
        """Replace the innermost item by `BROKEN`; return where to continue, and the parser state there.

        If the text around is broken too, an item of the layout may not be one for the parser; then the enclosing item
        is replaced.
        """
        first = self._item_of(at)
        while self.begun[-1][0] != first:
            self.begun.pop()
        while True:
            try:
                return self._replace(at)
            except UnfitToken:
                self.begun.pop()

    def _replace(self, at: int) -> tuple[int, Parse]:
        place, parser = self.begun[-1]
        begin = self.tokens[place]
        end = max(at, place)
        while not self._ends_item(self.tokens[end], begin.depth):
            end += 1
        last = self.tokens[max(end - 1, place)]
        named = begin.type == "NAME" and end > place
        name = begin.text if named else self._defined_name(place)
        broken = Token("BROKEN", begin.source, begin.start, max(last.end, begin.start), name, depth=begin.depth)
        parser = parser.copy()
        parser.feed(broken)
        return end, parser

    def _defined_name(self, place: int) -> str | None:
        """Return the name in a broken `let x = …` or `param x = …`."""
        begin, after = self.tokens[place], self.tokens[min(place + 1, len(self.tokens) - 1)]
        return after.text if begin.type in ("LET", "PARAM") and after.type == "NAME" else None

    @staticmethod
    def _ends_item(token: Token, depth: int) -> bool:
        return token.type == "$END" or token.depth < depth or (token.depth == depth and token.type in SEPARATORS)
