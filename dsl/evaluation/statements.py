"""Statements of a spec and its includes, read in order, and the sections that they are merged into."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from attrs import field

from xtrain.dsl.diagnostics.diagnostic import Diagnostic, Diagnostics, Fix, SourceText, Span
from xtrain.dsl.diagnostics.suggest import certain, closest, without
from xtrain.dsl.evaluation.evaluate import Definition, Names
from xtrain.dsl.evaluation.values import Value
from xtrain.dsl.syntax import tree as s
from xtrain.lazy_attrs import define
from xtrain.regular_files import read_regular


@define(eq=False)
class SectionEntry:
    """`name = value`; name_span: place of the name."""

    name_span: Span
    value: Value


@define(eq=False)
class Label:
    """A label as written, and the constants it may stand for if a number is wanted."""

    value: Value
    names: Names | None = None


@define(eq=False)
class Section:
    """A block, merged from everywhere it is written.

    kind: its keyword. heads: where it is written, the latest last. bare: heads that consist only of the keyword.
    broken: something in it could not be read, so nothing counts as missing. repeated: warnings about repetitions in one
    file, reported if it turns out to be a block.
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
    lost: set[str] = field(factory=set)  # settings whose value could not be read
    varied: set[str] = field(factory=set)  # entries to which `in` gives several values
    settled: list[s.Assign] = field(factory=list)  # entries with a body: the block that their value names

    @property
    def head(self) -> Span | None:
        return self.heads[-1] if self.heads else None

    @property
    def written(self) -> set[str]:
        """Names of the settings and blocks written in it, including unreadable ones."""
        return {*self.entries, *self.blocks, *self.lost}

    def block(self, kind: str) -> "Section":
        """Return the nested section of a kind; create it if needed."""
        return self.blocks.setdefault(kind, Section(kind))


@define(eq=False)
class TriggerSection:
    """An `every` or `on` statement, with either a period or an event. arguments: of the event.

    override: from `--set`, instead of the period or of the event's count.
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

    unread: a file, or a part of one that may contain anything, could not be read.
    """

    root: Section
    named: dict[str, dict[str, Section]] = field(factory=dict)
    triggers: list[TriggerSection] = field(factory=list)
    uses: list[s.Use] = field(factory=list)
    unread: bool = False

    def named_section(self, kind: str, label: str) -> Section:
        return self.named.setdefault(kind, {}).setdefault(label, Section(kind))


_DEEPEST: Final = 100  # files that include one another
LARGEST: Final = 2**20  # bytes of a spec with all its includes


@define(eq=False)
class ReadStatements:
    """All files of a spec. statements: their statements, with includes spliced in. files, trees: names and syntax tree
    of each source.

    broken: something could not be read; unread: a file, or the end of one, that may contain anything.
    """

    sources: list[SourceText] = field(factory=list)
    statements: list[tuple[s.Item, Names]] = field(factory=list)
    params: dict[str, Definition] = field(factory=dict)
    files: list[Names] = field(factory=list)
    trees: list[s.File] = field(factory=list)
    broken: bool = False
    unread: bool = False

    @property
    def definitions(self) -> Iterator[Definition]:
        yield from self.params.values()
        for names in self.files:
            yield from names.lets.values()


def read_spec(path: str, diagnostics: Diagnostics, texts: Mapping[str, str] | None = None) -> ReadStatements:
    """Read the spec at `path`; report what is unreadable. texts: path → text that replaces the file on disk."""
    reading = ReadStatements()
    _IncludeReader(reading, diagnostics, texts or {}).splice(path, None, ())
    return reading


def read_source(
    path: str, diagnostics: Diagnostics, *, place: Span | None = None, order: int = 0, data: bytes | None = None
) -> SourceText | None:
    """Return the text at `path`, or None after reporting why it is unreadable.

    place: the `include` that names it, or None for the spec itself. data: its bytes, if already read.
    """
    if data is None:
        data = _read(path, place, diagnostics)
    if data is None:
        return None
    if len(data) > LARGEST:
        _unreadable(path, f"it is larger than {LARGEST:,} bytes", place, diagnostics)
        return None
    try:
        return SourceText.from_bytes(path, data, order=order, included_at=place)
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        diagnostics.error(
            "X121", f"`{path}` is not UTF-8 text: the byte 0x{data[error.start]:02x} in line {line}", place,
            hint="save it as UTF-8",
        )  # fmt: skip
        return None


def _read(path: str, place: Span | None, diagnostics: Diagnostics) -> bytes | None:
    """Return the bytes of a file. place: the `include` that names it, or None for the spec itself."""
    hint, fix = None, None
    try:
        return read_regular(path, LARGEST)
    except FileNotFoundError:
        reason, meant = "there is no such file", _neighbour(path)
        if meant is not None:
            hint, fix = f"did you mean `{meant[0]}`?", _other_name(place, meant[0]) if meant[1] else None
    except IsADirectoryError:
        reason, hint = "it is a folder", "write a file, such as `spec.xtrain`"
    except PermissionError:
        reason = "no permission to read it"
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "this is not a file path"
    _unreadable(path, reason, place, diagnostics, hint, fix)
    return None


def _unreadable(
    path: str,
    reason: str,
    place: Span | None,
    diagnostics: Diagnostics,
    hint: str | None = None,
    fix: Fix | None = None,
) -> None:
    shown = path if path.isprintable() else repr(path)
    diagnostics.error("X120", f"cannot read `{shown}`: {reason}", place, hint=hint, fix=fix)


def _neighbour(path: str) -> tuple[Path, bool] | None:
    """Return a file of the same folder with a similar name, and whether it is the only candidate."""
    try:
        stem = Path(path).stem
        files = {p.stem: p for p in sorted(Path(path).parent.iterdir()) if p.suffix == ".xtrain"}
        name = closest(stem, files) or stem
    except (OSError, ValueError):
        return None
    return (files[name], name in (stem, certain(stem, files))) if name in files else None


def _other_name(place: Span | None, meant: Path) -> Fix | None:
    """Return the fix that replaces the last part of an include's path."""
    if place is None or place.text.count("\\"):
        return None
    folder, sign, _ = place.text.strip('"').rpartition("/")
    return Fix(place, f'"{folder}{sign}{meant.name}"')


class _IncludeReader:
    def __init__(self, reading: ReadStatements, diagnostics: Diagnostics, texts: Mapping[str, str]) -> None:
        from xtrain.dsl.syntax.parser import MOST_TOKENS, parse_file  # a rank loads this module, but parses nothing

        self.reading, self.diagnostics, self.texts, self.parse = reading, diagnostics, texts, parse_file
        self.bytes, self.tokens = LARGEST, MOST_TOKENS  # remaining allowance
        self.seen: dict[str, Span | None] = {}

    def splice(self, path: str, place: Span | None, above: tuple[tuple[str, str], ...]) -> None:
        """Insert the statements of a file. above: (real path, shown path) of the files that include it."""
        self.seen[_identity(path)] = place
        above = (*above, (_identity(path), path))
        data = self.texts[path].encode(errors="replace") if path in self.texts else None
        source = read_source(path, self.diagnostics, place=place, order=len(self.reading.sources), data=data)
        if source is None:
            self.reading.broken = self.reading.unread = True
            return
        self.bytes -= len(source.text)
        if self.bytes < 0:
            reason = f"with it, the spec and its includes are larger than {LARGEST:,} bytes"
            _unreadable(path, reason, place, self.diagnostics)
            self.reading.broken = self.reading.unread = True
            return
        self.reading.sources.append(source)
        names = Names(params=self.reading.params)
        self.reading.files.append(names)
        file = self.parse(source, self.diagnostics, self.tokens)
        self.tokens = max(0, self.tokens - file.tokens)
        self.reading.trees.append(file)
        self.reading.broken |= file.broken
        self.reading.unread |= file.unread
        for item in file.items:
            match item:
                case s.Include():
                    self._include(item, path, above)
                case s.Let():
                    self._define(Definition("let", item.name, item.value, names), names.lets)
                case s.Param():
                    self._define(Definition("param", item.name, item.value, names), self.reading.params)
                case s.Broken(name=str()) if (definition := _broken_definition(item, names)) is not None:
                    self._define(definition, names.lets if definition.kind == "let" else self.reading.params)
                case _:
                    self.reading.statements.append((item, names))

    def _include(self, item: s.Include, path: str, above: tuple[tuple[str, str], ...]) -> None:
        span = item.path.span
        if not item.path.value:
            hint = 'write `include "base.xtrain"`'
            self.diagnostics.error("X120", "the path of an include is empty", span, hint=hint)
            self.reading.broken = self.reading.unread = True
            return
        target = os.path.normpath(os.path.join(os.path.dirname(path), item.path.value))  # noqa: PTH118, PTH120
        identity = _identity(target)
        files = [real for real, _ in above]
        if identity in files:
            circle = [shown for _, shown in above[files.index(identity) :]]
            chain = " -> ".join(f"`{shown}`" for shown in [*circle, circle[0]])
            self.diagnostics.error("X213", "this include forms a cycle", span, hint=f"the cycle is {chain}")
            return
        if len(above) > _DEEPEST:
            hint = "include the parts of a spec from one file"
            self.diagnostics.error(
                "X120", f"cannot read `{target}`: too many files include one another", span, hint=hint
            )
            self.reading.broken = self.reading.unread = True
            return
        if identity in self.seen:
            first = self.seen[identity]
            self.diagnostics.add(Diagnostic(
                severity="warning", code="W203", message=f"`{target}` is included already, so this has no effect",
                span=span, hint="remove one of the two",
                notes=(("it is included here first", first),) if first else (), fix=without(item.span),
            ))  # fmt: skip
            return
        self.splice(target, span, above)

    def _define(self, definition: Definition, table: dict[str, Definition]) -> None:
        name = definition.name
        earlier = definition.names.lets.get(name.text) or self.reading.params.get(name.text)
        if earlier is not None:
            earlier.twice = True
            hint = "rename one of them"
            if definition.kind == earlier.kind == "param":
                hint = "define it once; `--set` replaces its value"
            self.diagnostics.error(
                "X211", f"`{name.text}` is defined twice", name.span, hint=hint,
                notes=[("the first is here", earlier.name.span)],
            )  # fmt: skip
            return
        table[name.text] = definition


def _broken_definition(item: s.Broken, names: Names) -> Definition | None:
    """Return the `let` or `param` of an item whose value could not be read, so that its uses report no errors."""
    kind, _, rest = item.span.text.partition(" ")
    if kind not in ("let", "param") or item.name is None:
        return None
    start = item.span.start + len(kind) + 1 + len(rest) - len(rest.lstrip())
    name = s.Name(Span(item.span.source, start, start + len(item.name)), item.name)
    return Definition(kind, name, s.Unread(item.span), names)


def _identity(path: str) -> str:
    """Return one string per file, however its path is written."""
    try:
        return os.path.realpath(path)
    except (OSError, ValueError):
        return path
