"""What a spec says after includes, constants and overrides are applied: names and values, not yet checked."""

from attrs import define, field

from xtrain.dsl.diagnostics.diagnostic import Diagnostic
from xtrain.dsl.diagnostics.source import Span
from xtrain.dsl.evaluation.evaluate import Names
from xtrain.dsl.evaluation.values import Value
from xtrain.dsl.syntax import tree as s


@define(eq=False)
class SectionEntry:
    """`name = value`; name_span: where the name stands."""

    name_span: Span
    value: Value


@define(eq=False)
class Label:
    """A label as it is written, and the constants it may stand for where a number is wanted."""

    value: Value
    names: Names | None = None


@define(eq=False)
class Section:
    """A block, merged from everywhere it is written.

    kind: the word that opens it. heads: where it is written, the latest last. bare: those of them without anything
    behind the word. broken: something in it could not be read, so nothing may be called missing. repeated: warnings of
    what one file gives it twice, for when it turns out to be a block.
    """

    kind: str
    heads: list[Span] = field(factory=list)
    bare: list[Span] = field(factory=list)
    labels: list[Label] = field(factory=list)
    arguments: tuple[s.Argument, ...] | None = None  # of an action that takes them in brackets
    entries: dict[str, SectionEntry] = field(factory=dict)
    blocks: dict[str, "Section"] = field(factory=dict)
    broken: bool = False
    repeated: list[Diagnostic] = field(factory=list)
    lost: set[str] = field(factory=set)  # names of settings whose value could not be read
    varied: set[str] = field(factory=set)  # of the entries, those that `in` gives several values
    settled: list[s.Assign] = field(factory=list)  # entries with a body: the block that their value names

    @property
    def head(self) -> Span | None:
        return self.heads[-1] if self.heads else None

    @property
    def written(self) -> set[str]:
        """The names of the settings and blocks that are written in it, those that could not be read among them."""
        return {*self.entries, *self.blocks, *self.lost}

    def block(self, kind: str) -> "Section":
        """The nested section of a kind, made if it is not there."""
        return self.blocks.setdefault(kind, Section(kind))


@define(eq=False)
class TriggerSection:
    """An `every` or `on` statement: exactly one of period and event is given. arguments: behind the event.

    override: what `--set` says in place of the period, or of the number behind the event.
    """

    span: Span
    names: Names
    actions: list[tuple[s.Name, Section]]
    period: s.Expression | None = None
    event: s.Name | None = None
    arguments: tuple[s.Argument, ...] = ()
    override: Value | None = None


@define(eq=False)
class Tree:
    """A whole spec. named: for each named kind, the sections by label.

    unread: a file, or a part of one that may hold anything, could not be read.
    """

    root: Section
    named: dict[str, dict[str, Section]] = field(factory=dict)
    triggers: list[TriggerSection] = field(factory=list)
    uses: list[s.Use] = field(factory=list)
    unread: bool = False

    def named_section(self, kind: str, label: str) -> Section:
        return self.named.setdefault(kind, {}).setdefault(label, Section(kind))
