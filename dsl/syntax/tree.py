"""Tokens and the syntax tree of a spec. Spans are ignored when trees are compared."""

from typing import Any, Final

from attrs import field

from xtrain.dsl.diagnostics.diagnostic import SourceText, Span
from xtrain.dsl.values import Quantity
from xtrain.lazy_attrs import define, frozen

SEPARATORS: Final = ("_COMMA", "_NEWLINE")
OPENERS: Final = {"LPAR": "RPAR", "LSQB": "RSQB", "LBRACE": "RBRACE"}
CLOSERS: Final = {closer: opener for opener, closer in OPENERS.items()}
STATEMENTS: Final = {"include": "INCLUDE", "use": "USE", "let": "LET", "param": "PARAM", "every": "EVERY", "on": "ON"}
CONSTANTS: Final = {"true": "TRUE", "false": "FALSE", "none": "NONE", "auto": "AUTO"}


@define(eq=False)
class Token:
    """A token of `grammar.lark`. `ERROR` marks text that the lexer has already reported.

    value: the value of a number or string. depth: number of enclosing brackets. starts_item: it is the first token of a
    statement. assumed: it is not in the text; the layout inserted it.
    """

    type: str
    source: SourceText
    start: int
    end: int
    value: Any = None
    depth: int = 0
    starts_item: bool = False
    assumed: bool = False

    @property
    def span(self) -> Span:
        return Span(self.source, self.start, self.end)

    @property
    def text(self) -> str:
        return self.source.text[self.start : self.end]


@frozen
class SyntaxNode:
    """Base of nodes, written at `span`."""

    span: Span = field(eq=False, repr=False)


# Expressions ----------------------------------------------------------------------------------------------------------


@frozen
class Name(SyntaxNode):
    text: str


@frozen
class Number(SyntaxNode):
    value: int | float | Quantity


@frozen
class String(SyntaxNode):
    value: str


@frozen
class FixedWord(SyntaxNode):
    """`true`, `false`, `none` or `auto`."""

    word: str


@frozen
class Reference(SyntaxNode):
    """`width`, `eval.code.loss`: a constant, a fixed word of a setting, or a path."""

    parts: tuple[str, ...]

    @property
    def text(self) -> str:
        return ".".join(self.parts)


@frozen
class Negative(SyntaxNode):
    operand: "Expression"


@frozen
class Binary(SyntaxNode):
    """A binary operation. operator: one of `+ - * / // % **`."""

    operator: str
    left: "Expression"
    right: "Expression"


@frozen
class ListOf(SyntaxNode):
    items: tuple["Expression", ...]


@frozen
class Entry(SyntaxNode):
    key: Name | String
    value: "Expression"


@frozen
class Map(SyntaxNode):
    entries: tuple[Entry, ...]


@frozen
class Argument(SyntaxNode):
    name: Name | None
    value: "Expression"


@frozen
class Call(SyntaxNode):
    function: Name
    arguments: tuple[Argument, ...]


@frozen
class ChainExpression(SyntaxNode):
    """`a -> b -> c`."""

    links: tuple["Expression", ...]


@frozen
class IntervalExpression(SyntaxNode):
    """`a..b`."""

    low: "Expression"
    high: "Expression"


@frozen
class Unread(SyntaxNode):
    """A value whose brackets had to be guessed; nothing more is reported about it."""


Expression = (
    Unread
    | Number
    | String
    | FixedWord
    | Reference
    | Negative
    | Binary
    | ListOf
    | Map
    | Call
    | ChainExpression
    | IntervalExpression
)

# Statements -----------------------------------------------------------------------------------------------------------


@frozen
class Broken(SyntaxNode):
    """An unreadable item. name: the setting, if that was clear."""

    name: str | None = None


@frozen
class Assign(SyntaxNode):
    """`name = value`. body: settings of the word that is the value, as in `compute = fp8 { recipe = rowwise }`."""

    name: Name
    value: Expression
    body: "Body | None" = None


@frozen
class Vary(SyntaxNode):
    """`optimizer.lr in [1e-3, 3e-3]`. name: the whole path."""

    name: Name
    value: Expression


@frozen
class Body(SyntaxNode):
    """A body of a block. broken: its brackets had to be guessed, so written items may be missing."""

    items: tuple["Item", ...]
    broken: bool = field(default=False, eq=False)


Label = Name | String | Number | FixedWord | Call | Unread


@frozen
class Block(SyntaxNode):
    """A block. arguments: of an action that takes them in brackets, else None."""

    kind: Name
    labels: tuple[Label, ...]
    body: Body | None
    arguments: tuple[Argument, ...] | None = None


@frozen
class Let(SyntaxNode):
    name: Name
    value: Expression


@frozen
class Param(SyntaxNode):
    name: Name
    value: Expression


@frozen
class Include(SyntaxNode):
    path: String


@frozen
class Use(SyntaxNode):
    target: String | Reference


@frozen
class Every(SyntaxNode):
    period: Expression
    actions: tuple[Block, ...]


@frozen
class On(SyntaxNode):
    event: Name
    arguments: tuple[Argument, ...]
    actions: tuple[Block, ...]


Item = Assign | Vary | Block | Let | Param | Include | Use | Every | On | Broken


@frozen
class File:
    """A whole text. broken: brackets had to be guessed or a string ran to the end; unread: the latter, or nothing was
    read. tokens: their number, including comments and line ends."""

    source: SourceText = field(eq=False)
    items: tuple[Item, ...]
    broken: bool = field(default=False, eq=False)
    unread: bool = field(default=False, eq=False)
    tokens: int = field(default=0, eq=False)
