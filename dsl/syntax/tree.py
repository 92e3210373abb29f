"""The syntax tree of a spec: what was written, not yet what it means. Spans do not count when trees are compared."""

from attrs import field, frozen

from ..diagnostics.source import Source, Span
from ..quantity import Quantity


@frozen
class Node:
    """Something that was written at `span`."""

    span: Span = field(eq=False, repr=False)


# Expressions ----------------------------------------------------------------------------------------------------------


@frozen
class Name(Node):
    text: str


@frozen
class Number(Node):
    value: int | float | Quantity


@frozen
class String(Node):
    value: str


@frozen
class Constant(Node):
    """`true`, `false`, `none` or `auto`."""

    word: str


@frozen
class Reference(Node):
    """`width`, `eval.code.loss`: a constant, a fixed word of a setting, or a path."""

    parts: tuple[str, ...]

    @property
    def text(self) -> str:
        return ".".join(self.parts)


@frozen
class Negative(Node):
    operand: "Expression"


@frozen
class Binary(Node):
    """operator: one of `+ - * / // % **`."""

    operator: str
    left: "Expression"
    right: "Expression"


@frozen
class ListOf(Node):
    items: tuple["Expression", ...]


@frozen
class Entry(Node):
    key: Name | String
    value: "Expression"


@frozen
class Map(Node):
    entries: tuple[Entry, ...]


@frozen
class Argument(Node):
    name: Name | None
    value: "Expression"


@frozen
class Call(Node):
    function: Name
    arguments: tuple[Argument, ...]


@frozen
class Chain(Node):
    """`a -> b -> c`."""

    links: tuple["Expression", ...]


@frozen
class Interval(Node):
    """`a..b`."""

    low: "Expression"
    high: "Expression"


@frozen
class Unread(Node):
    """A value whose brackets had to be guessed; nothing more is said about it."""


Expression = (
    Unread | Number | String | Constant | Reference | Negative | Binary | ListOf | Map | Call | Chain | Interval
)

# Statements -----------------------------------------------------------------------------------------------------------


@frozen
class Broken(Node):
    """An item that could not be read. name: what it would have set, where that much was clear."""

    name: str | None = None


@frozen
class Assign(Node):
    name: Name
    value: Expression


@frozen
class Body(Node):
    """broken: its brackets had to be guessed, so that something may be missing that was written."""

    items: tuple["Item", ...]
    broken: bool = field(default=False, eq=False)


Label = Name | String | Number | Constant


@frozen
class Block(Node):
    """arguments: of an action that takes them in brackets, else None."""

    kind: Name
    labels: tuple[Label, ...]
    body: Body | None
    arguments: tuple[Argument, ...] | None = None


@frozen
class Let(Node):
    name: Name
    value: Expression


@frozen
class Param(Node):
    name: Name
    value: Expression


@frozen
class Include(Node):
    path: String


@frozen
class Use(Node):
    target: String | Reference


@frozen
class Every(Node):
    period: Expression
    actions: tuple[Block, ...]


@frozen
class On(Node):
    event: Name
    arguments: tuple[Argument, ...]
    actions: tuple[Block, ...]


Item = Assign | Block | Let | Param | Include | Use | Every | On | Broken


@frozen
class File:
    """A whole text. broken: brackets had to be guessed or a string ran to the end; unread: the latter."""

    source: Source = field(eq=False)
    items: tuple[Item, ...]
    broken: bool = field(default=False, eq=False)
    unread: bool = field(default=False, eq=False)
