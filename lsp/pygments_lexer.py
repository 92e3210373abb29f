"""Lexer of Pygments for `pygmentize -l xtrain`, Sphinx, MkDocs and notebooks, and its table of lexemes.

The grammars of `editors/` are made of the same table.
"""

import re
from collections.abc import Iterable
from functools import cache
from typing import Any, Final

from pygments.lexer import RegexLexer, bygroups
from pygments.token import String, Whitespace, string_to_tokentype

from xtrain.dsl.checking.convert import SCALES
from xtrain.dsl.evaluation.evaluate import FUNCTIONS
from xtrain.dsl.reference.reference import every_page
from xtrain.dsl.schema import blocks
from xtrain.dsl.schema.data_components import LINKS, SOURCES
from xtrain.dsl.syntax.lexer import MULTIPLIERS, UNIT_WORDS
from xtrain.dsl.syntax.tree import CONSTANTS, STATEMENTS
from xtrain.lazy_attrs import frozen

_QUANTITY: Final = (
    ("constant.numeric", "", "keyword.other.unit"),
    ("Literal.Number", "Text.Whitespace", "Keyword.Type"),
)
NUMBER: Final = r"[0-9]+(?:_[0-9]+)*(?:\.[0-9]+(?:_[0-9]+)*)?(?:[eE][-+]?[0-9]+)?"


@frozen
class Lexeme:
    """A pattern of the table. pattern: valid in Python and in Oniguruma, tried in the order of the table. scopes
    (TextMate) and tokens (Pygments): one per group of the pattern, or one for the whole; blanks have an empty scope."""

    name: str
    pattern: str
    scopes: tuple[str, ...]
    tokens: tuple[str, ...]


@frozen
class WordLists:
    """The words of the language by category."""

    statements: tuple[str, ...]
    constants: tuple[str, ...]
    blocks: tuple[str, ...]
    actions: tuple[str, ...]
    calls: tuple[str, ...]
    events: tuple[str, ...]
    settings: tuple[str, ...]
    choices: tuple[str, ...]
    units: tuple[str, ...]
    multipliers: tuple[str, ...]


@cache
def word_lists() -> WordLists:
    """Return all words of the schema."""
    pages = tuple(every_page())
    fields = [field for page in pages for field in (*((page.label,) if page.label else ()), *page.fields)]
    words = {word for field in fields for word in field.choices if re.fullmatch(r"\w+", word)}
    kinds = {page.name for page in pages if page.group == "block"}
    return WordLists(
        statements=(*STATEMENTS, "then", "in"),
        constants=tuple(CONSTANTS),
        blocks=_sorted(kinds),
        actions=_sorted(blocks.ACTIONS),
        calls=_sorted((*FUNCTIONS, *SOURCES, *LINKS, *SCALES, "hub")),
        events=_sorted(blocks.EVENTS),
        settings=_sorted(
            {"collate", *(f.name for f in fields if not f.is_label and not f.is_block and f.name != "NAME")}
        ),
        choices=_sorted(words - set(CONSTANTS)),
        units=_sorted(UNIT_WORDS),
        multipliers=_sorted(MULTIPLIERS),
    )


@cache
def lexemes() -> tuple[Lexeme, ...]:
    """Return the table. Strings are not in it: they may span lines, for which each tool has its own syntax."""
    words = word_lists()
    end = r"\b(?!\s*[=:.(])"
    number = rf"({NUMBER}(?:{_any(words.multipliers)})?\b|{NUMBER})"
    unit = rf"([ \t]*)((?:{_any(words.units)})\b(?![ \t]*[=(:]))"
    return (
        Lexeme("comment", r"#.*", ("comment.line.number-sign",), ("Comment.Single",)),
        Lexeme("schedule", r"\b1f1b\b", ("support.constant.choice",), ("Name.Constant",)),
        Lexeme("quantity", rf"\b{number}{unit}", *_QUANTITY),
        Lexeme("percent", rf"\b{number}([ \t]*)(%)(?![ \t]*[\w(\"])", *_QUANTITY),
        Lexeme("number", rf"\b{number}", ("constant.numeric",), ("Literal.Number",)),
        Lexeme("statement", rf"\b({_any(words.statements)})\b(?!\s*[=:])", ("keyword.control",), ("Keyword",)),
        Lexeme("constant", rf"\b({_any(words.constants)})\b", ("constant.language",), ("Keyword.Constant",)),
        Lexeme(
            "setting", rf"\b({_any(words.settings)})\b(?=\s*=)", ("support.type.property-name",), ("Name.Attribute",)
        ),
        Lexeme("assigned", r"\b([^\W\d]\w*)\b(?=\s*[=:])", ("variable.other.assigned",), ("Name.Variable",)),
        Lexeme("call", rf"\b({_any(words.calls)})\b(?=\s*\()", ("support.function",), ("Name.Function",)),
        Lexeme("own_call", r"\b([^\W\d]\w*)\b(?=\s*\()", ("entity.name.function",), ("Name.Function",)),
        Lexeme("block", rf"\b({_any(words.blocks)}){end}", ("storage.type.block",), ("Name.Class",)),
        Lexeme("action", rf"\b({_any(words.actions)}){end}", ("support.function.action",), ("Name.Builtin",)),
        Lexeme("event", rf"\b({_any(words.events)}){end}", ("support.constant.event",), ("Name.Constant",)),
        Lexeme("link", rf"\b({_any(words.calls)}){end}", ("support.function",), ("Name.Function",)),
        Lexeme("choice", rf"\b({_any(words.choices)}){end}", ("support.constant.choice",), ("Name.Constant",)),
        Lexeme("name", r"[^\W\d]\w*", ("variable.other",), ("Name",)),
        Lexeme("operator", r"->|\.\.|\*\*|//|[-+*/%=:]", ("keyword.operator",), ("Operator",)),
        Lexeme("bracket", r"[{}()\[\]]", ("punctuation.section",), ("Punctuation",)),
        Lexeme("separator", r"[,.]", ("punctuation.separator",), ("Punctuation",)),
        Lexeme("wrong", r"\S", ("invalid.illegal",), ("Error",)),
    )


def _any(words: Iterable[str]) -> str:
    """Return a pattern of any of these words, the longer first."""
    return "|".join(re.escape(word) for word in sorted(words, key=lambda word: (-len(word), word)))


def _sorted(words: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(words)))


def _rule(lexeme: Lexeme) -> tuple[str, Any]:
    types = [string_to_tokentype(token) for token in lexeme.tokens]
    return lexeme.pattern, types[0] if len(types) == 1 else bygroups(*types)


_ESCAPE = (r"\\(?:u\{[0-9A-Fa-f]*\}|.)", String.Escape)


class SpecLexer(RegexLexer):
    """Lexer of specs: `*.xtrain`."""

    name = "xtrain"
    aliases = ["xtrain"]  # noqa: RUF012
    filenames = ["*.xtrain"]  # noqa: RUF012
    tokens = {  # noqa: RUF012
        "root": [
            (r"\s+", Whitespace),
            (r'"""', String.Double, "triple"),
            (r'"', String.Double, "string"),
            *(_rule(each) for each in lexemes()),
        ],
        "triple": [(r'"""', String.Double, "#pop"), _ESCAPE, (r'[^"\\]+|"', String.Double)],
        "string": [
            (r'"', String.Double, "#pop"),
            (r"\n", Whitespace, "#pop"),
            _ESCAPE,
            (r'[^"\\\n]+|\\', String.Double),
        ],
    }
