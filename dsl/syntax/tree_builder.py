"""From the rules of `grammar.lark` to the nodes of `syntax`: lark calls a method for every rule it completes."""

import os
import sys
from functools import cache
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

from lark import Lark, Transformer
from lark.lexer import Lexer

from xtrain.dsl.syntax import tree as s
from xtrain.dsl.syntax.tokens import Token

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


class TreeBuilder(Transformer):
    """One method a rule; `parts` are the named tokens and the nodes of the rule, in order."""

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


class _NoLexer(Lexer):
    """The parser is fed with tokens that are made already."""

    def __init__(self, lexer_conf: Any) -> None: ...

    def lex(self, lexer_state: Any, parser_state: Any) -> Any:
        return iter(())


@cache
def grammar() -> Lark:
    """The parser of `grammar.lark`. Its table is computed once and kept beside the bytecode of this module."""
    text = Path(__file__).with_name("grammar.lark").read_text(encoding="utf-8")
    options = {"parser": "lalr", "lexer": _NoLexer, "start": "file", "transformer": TreeBuilder()}
    return Lark(text, cache=_table_file() or False, **options)


def _table_file() -> str | None:
    """Where the table is kept; None if Python keeps no bytecode here either. lark compares grammar and version."""
    file = Path(cache_from_source(__file__)).with_suffix(".table")
    writable = not sys.dont_write_bytecode and os.access(file.parent, os.W_OK)
    return str(file) if writable or file.exists() else None
