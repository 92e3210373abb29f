"""Names of a spec with the places where each is written, and semantic highlighting."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final, Literal

import attrs

from xtrain.dsl.diagnostics.diagnostic import Span
from xtrain.dsl.evaluation.evaluate import FUNCTIONS, Definition, Names
from xtrain.dsl.schema import blocks
from xtrain.dsl.schema.setting import open_setting, settings_of
from xtrain.dsl.spec import Spec
from xtrain.dsl.spec_text import is_plain
from xtrain.dsl.syntax import tree as s
from xtrain.dsl.syntax.lexer import UNIT_WORDS
from xtrain.dsl.syntax.tree import CONSTANTS, STATEMENTS, Token
from xtrain.dsl.user_parts.reader import Declared
from xtrain.dsl.values import Metric
from xtrain.lazy_attrs import frozen
from xtrain.lsp.analysis import Analysis
from xtrain.lsp.place import WORDS, Place, label_is_dataset, places, takes_datasets

NameKind = Literal["let", "param", "dataset", "function"]
RENAMED: Final = ("let", "param", "dataset")


@frozen
class Occurrence:
    """An occurrence of a name. owner: its definition or function; None for a dataset. defines: it defines the name.
    quoted: it is a string whose quotes are in `span`."""

    kind: NameKind
    name: str
    span: Span
    owner: Definition | Declared | None = None
    defines: bool = False
    quoted: bool = False

    def is_same(self, other: "Occurrence") -> bool:
        """Return True if both mean the same thing."""
        return self.kind == other.kind and self.name == other.name and self.owner is other.owner


class RenameRefused(Exception):
    """An impossible rename; the message gives the reason."""


def occurrences(analysis: Analysis) -> list[Occurrence]:
    """Return all user-defined names in all files of a spec, except those nested deeper than Python's stack, which is an
    error (X130, X307)."""
    reading = analysis.loaded.reading
    if reading is None:
        return []
    found: list[Occurrence] = []
    for tree, names in zip(reading.trees, reading.files, strict=True):
        with suppress(RecursionError):
            found += _Reader(analysis, names).file(tree)
    return found


def occurrence_at(analysis: Analysis, path: str, offset: int) -> Occurrence | None:
    """Return the name under the cursor."""
    touching = [o for o in occurrences(analysis) if o.span.source.path == path and o.span.start <= offset <= o.span.end]
    return min(touching, key=lambda each: each.span.end - each.span.start, default=None)


def definitions(analysis: Analysis, path: str, offset: int) -> list[Span]:
    """Return the definitions of a name under the cursor, or the file of an `include` or `use`."""
    found = occurrence_at(analysis, path, offset)
    if found is None:
        return _file_at(analysis, path, offset)
    if isinstance(found.owner, Definition):
        return [found.owner.name.span]
    if found.owner is not None:
        return [found.owner.span]
    return [each.span for each in occurrences(analysis) if each.defines and each.is_same(found)]


def references(analysis: Analysis, path: str, offset: int) -> list[Span]:
    """Return all occurrences of the name under the cursor."""
    found = occurrence_at(analysis, path, offset)
    return [] if found is None else [each.span for each in occurrences(analysis) if each.is_same(found)]


def rename(analysis: Analysis, path: str, offset: int, name: str) -> list[tuple[Span, str]]:
    """Return the edits that rename a constant or dataset to `name`. Raises RenameRefused.

    The renamed spec must have the same diagnostics, by code, and renamed constants must give the same spec; otherwise
    the rename is refused.
    """
    found = occurrence_at(analysis, path, offset)
    if found is None or found.kind not in RENAMED:
        raise RenameRefused("only the names of datasets, `let` and `param` can be renamed")
    every = occurrences(analysis)
    if found.kind == "dataset" and name != found.name and any(o.kind == "dataset" and o.name == name for o in every):
        raise RenameRefused(f"`{name}` already exists")
    if found.kind != "dataset" and not is_plain(name):
        raise RenameRefused(f"`{name}` is not a name: use letters, digits and `_`")
    quoted = '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'
    edits = []
    for each in every:
        if not each.is_same(found):
            continue
        if not is_plain(name) and _is_in_path(each):
            raise RenameRefused(f"`{name}` is not allowed in `{each.span.source.line(each.span.line).strip()}`")
        edits.append((each.span, name if is_plain(name) else quoted))
    texts = {source.path: source.text for source in analysis.loaded.sources}
    for span, text in sorted(edits, key=lambda edit: edit[0].start, reverse=True):
        before = texts[span.source.path]
        texts[span.source.path] = before[: span.start] + text + before[span.end :]
    after = Analysis.of(analysis.root, texts)
    old, new = (sorted(d.code for d in each.diagnostics) for each in (analysis, after))
    if old != new:
        wrong = next((d.message for d in after.diagnostics if new.count(d.code) > old.count(d.code)), "it would change")
        raise RenameRefused(f"with that name, {wrong}")
    if found.kind != "dataset" and after.loaded.spec != _renamed(analysis.loaded.spec, found, name):
        raise RenameRefused(f"`{name}` means something else where it is used already")
    return edits


def _is_in_path(each: Occurrence) -> bool:
    """Return True if the name follows a dot, as in `eval.web.loss`, where there are no quotes."""
    text, start = each.span.source.text, each.span.start
    return text[max(0, start - 1) : start] == "."


def _renamed(spec: Spec | None, found: Occurrence, name: str) -> Spec | None:
    """Return the spec after renaming a constant: a `param` may be a dimension of its sweep."""
    if spec is None or spec.sweep is None or found.kind != "param":
        return spec
    over = {name if each == found.name else each: values for each, values in spec.sweep.over.items()}
    return attrs.evolve(spec, sweep=attrs.evolve(spec.sweep, over=over))


def _file_at(analysis: Analysis, path: str, offset: int) -> list[Span]:
    """Return the start of the file named by the `include` or `use` string around an offset."""
    words = analysis.words(path)
    token = words.at(offset) if words is not None else None
    sources = [*analysis.loaded.sources, *(part.declared.span.source for part in analysis.loaded.parts.values())]
    found = [each for each in sources if each.included_at is not None and token is not None]
    there = [each for each in found if each.included_at and each.included_at.source.path == path]
    return [Span(s_, 0, 0) for s_ in there if s_.included_at and s_.included_at.start <= offset <= s_.included_at.end][
        :1
    ]


class _Reader:
    """Reads the syntax tree of one file. names: constants in scope."""

    def __init__(self, analysis: Analysis, names: Names) -> None:
        self.names, self.parts = names, analysis.loaded.parts
        spec = analysis.spec
        self.datasets = set(spec.datasets) if spec is not None else set[str]()
        self.actions = self.parts.actions()
        self.found: list[Occurrence] = []

    def file(self, tree: s.File) -> list[Occurrence]:
        for item in tree.items:
            self._item(item)
        return self.found

    def _item(self, item: s.Item) -> None:
        match item:
            case s.Let(name=name, value=value) | s.Param(name=name, value=value):
                definition = self.names.find(name.text)
                kind: Any = "let" if isinstance(item, s.Let) else "param"
                self.found.append(Occurrence(kind, name.text, name.span, definition, defines=True))
                self._expression(value)
            case s.Assign(value=value):
                self._expression(value)
            case s.Vary(name=name, value=value):
                self._path(name)
                self._expression(value)
            case s.Every(period=period, actions=actions):
                self._expression(period)
                for action in actions:
                    self._block(action, self.actions.get(action.kind.text))
            case s.On(arguments=arguments, actions=actions):
                self._arguments(arguments)
                for action in actions:
                    self._block(action, self.actions.get(action.kind.text))
            case s.Block():
                self._block(item, blocks.KINDS.get(item.kind.text), top=True)

    def _block(self, item: s.Block, block: type | None, *, top: bool = False) -> None:
        defines = top and item.kind.text == "dataset"
        for label in item.labels:
            self._label(label, defines=defines, dataset=defines or label_is_dataset(block))
        self._arguments(item.arguments or ())
        if item.body is None:
            return
        known = settings_of(block) if block is not None else {}
        free = open_setting(block) if block is not None else None
        weights = free is not None and free[1].names == "dataset"
        for inner in item.body.items:
            match inner:
                case s.Assign(name=name, value=value, body=body):
                    if weights and name.text not in known:
                        self._dataset(name.text, name.span)
                    self._expression(value, keys_are_datasets=takes_datasets(known.get(name.text)))
                    for each in body.items if body is not None else ():
                        self._item(each)
                case s.Block(kind=kind):
                    attribute: attrs.Attribute | None = known[kind.text][0] if kind.text in known else None
                    nested = attribute.type if attribute is not None and blocks.is_block(attribute.type) else None
                    self._block(inner, nested)
                case _:
                    self._item(inner)

    def _path(self, path: s.Name) -> None:
        """Add the names in the path of a sweep dimension: a `param`, or a dataset."""
        if path.span.text != path.text:
            return
        definition = self.names.find(path.text)
        if definition is not None and definition.kind == "param":
            self._constant(path.text, path.span, definition)
        start = path.span.start
        before = ""
        for part in path.text.split("."):
            if before in ("dataset", "eval") and part in self.datasets:
                self._dataset(part, Span(path.span.source, start, start + len(part)))
            start, before = start + len(part) + 1, part

    def _label(self, label: s.Label, *, defines: bool, dataset: bool) -> None:
        match label:
            case s.Name(text=text, span=span) if dataset:
                self._dataset(text, span, defines=defines)
            case s.String(value=text, span=span) if dataset:
                self._dataset(text, span, defines=defines, quoted=True)
            case s.Name(text=text, span=span):
                if text in self.parts:
                    self.found.append(Occurrence("function", text, span, self.parts[text].declared))
                elif (definition := self.names.find(text)) is not None:
                    self._constant(text, span, definition)
            case s.Call():
                self._expression(label)

    def _dataset(self, name: str, span: Span, *, defines: bool = False, quoted: bool = False) -> None:
        self.found.append(Occurrence("dataset", name, span, None, defines, quoted))

    def _constant(self, name: str, span: Span, definition: Definition) -> None:
        kind: Any = definition.kind
        self.found.append(Occurrence(kind, name, span, definition))

    def _arguments(self, arguments: tuple[s.Argument, ...]) -> None:
        for argument in arguments:
            self._expression(argument.value)

    def _expression(self, node: s.Expression, *, keys_are_datasets: bool = False) -> None:
        for each in _within(node):
            match each:
                case s.Reference(text=text, span=span):
                    self._reference(text, span)
                case s.Call(function=function) if function.text in self.parts:
                    self.found.append(
                        Occurrence("function", function.text, function.span, self.parts[function.text].declared)
                    )
                case s.Map(entries=entries) if keys_are_datasets:
                    for entry in entries:
                        quoted = isinstance(entry.key, s.String)
                        name = entry.key.value if isinstance(entry.key, s.String) else entry.key.text
                        self._dataset(name, entry.key.span, quoted=quoted)

    def _reference(self, text: str, span: Span) -> None:
        metric = Metric.read(text)
        if (definition := self.names.find(text)) is not None:
            self._constant(text, span, definition)
        elif text in self.parts:
            self.found.append(Occurrence("function", text, span, self.parts[text].declared))
        elif metric is not None and span.text == text and metric.dataset in self.datasets:
            start = span.start + len("eval.")
            self._dataset(metric.dataset, Span(span.source, start, start + len(metric.dataset)))


def _within(node: s.Expression) -> Iterator[s.Expression]:
    """Yield an expression and all its subexpressions; iteratively, because a text may nest deeper than Python's
    stack."""
    waiting: list[s.Expression] = [node]
    while waiting:
        each = waiting.pop()
        yield each
        match each:
            case s.Negative(operand=operand):
                waiting.append(operand)
            case s.Binary(left=left, right=right) | s.IntervalExpression(low=left, high=right):
                waiting += [left, right]
            case s.ListOf(items=items) | s.ChainExpression(links=items):
                waiting += items
            case s.Map(entries=entries):
                waiting += [entry.value for entry in entries]
            case s.Call(arguments=arguments):
                waiting += [argument.value for argument in arguments]


# In the order of the protocol's legend.
KINDS: Final = (
    "keyword", "class", "property", "enumMember", "variable", "namespace", "function", "string", "number", "comment",
    "operator", "event",
)  # fmt: skip
_NAMED: Final = {"let": "variable", "param": "variable", "dataset": "namespace", "function": "function"}
_OPERATORS: Final = (
    "_EQ", "_ARROW", "_TO", "PLUS", "MINUS", "STAR", "SLASH", "DSLASH", "PERCENT", "POW", "_COLON",
)  # fmt: skip


@frozen
class Colored:
    """A colored token. kind: one of `KINDS`, for the characters from `start` to `end`, within a line. defines: it
    defines a name."""

    start: int
    end: int
    kind: str
    defines: bool = False


def colored(analysis: Analysis, path: str) -> list[Colored]:
    """Return the tokens of a file that have a color, in order."""
    words = analysis.words(path)
    if words is None:
        return []
    named = {each.span.start: each for each in occurrences(analysis) if each.span.source.path == path}
    found = [Colored(each.start, each.end, "comment") for each in words.comments]
    seen: Place | None = None
    tokens = [(token, place) for token, place in places(words) if token.start < token.end]
    for number, (token, seen) in enumerate(tokens):
        following = tokens[number + 1][0].type if number + 1 < len(tokens) else "$END"
        found += _parts(token, seen, following, named, words.source.text)
    lines = [piece for each in found for piece in _lines(each, words.source.text)]
    return sorted(lines, key=lambda each: each.start)


def _parts(token: Token, place: Place, following: str, named: dict[int, Occurrence], text: str) -> Iterator[Colored]:
    if token.start in named:
        each = named[token.start]
        yield Colored(each.span.start, each.span.end, _NAMED[each.kind], each.defines)
        return
    if token.type == "NUMBER":
        unit = next((w for w in UNIT_WORDS if token.text.endswith(f" {w}")), "")
        yield Colored(token.start, token.end - len(unit) - (1 if unit else 0), "number")
        if unit:
            yield Colored(token.end - len(unit), token.end, "keyword")
        return
    inside = next((o for o in named.values() if token.start < o.span.start and o.span.end <= token.end), None)
    if inside is not None:  # the dataset in `eval.NAME.loss`
        yield Colored(token.start, inside.span.start, "property")
        yield Colored(inside.span.start, inside.span.end, "namespace")
        return
    kind = _kind(token, place, following)
    if kind is not None:
        yield Colored(token.start, token.end, kind)


def _kind(token: Token, place: Place, following: str) -> str | None:
    item = place.item
    if token.type in (*STATEMENTS.values(), "THEN", "IN") or token.text in CONSTANTS:
        return "keyword"
    if token.type == "STRING" or (token.type == "ERROR" and token.text.startswith('"')):
        return "string"
    if token.type in _OPERATORS:
        return "operator"
    if token.type not in WORDS:
        return None
    if following == "_EQ" or following == "_COLON":
        return "property"
    if following == "LPAR" or token.text in FUNCTIONS:
        return "function"
    if item and item[0].type == "ON" and len(item) == 1:
        return "event"
    if item and item[0].type in ("EVERY", "ON"):
        return "function" if item[-1].type not in WORDS or len(item) == 2 else "enumMember"
    if not item and place.inner.kind == "block":
        return "class"
    return "enumMember"


def _lines(each: Colored, text: str) -> Iterator[Colored]:
    """Yield the pieces of a token on each of its lines."""
    start = each.start
    for line in text[each.start : each.end].split("\n"):
        if line:
            yield Colored(start, start + len(line), each.kind, each.defines)
        start += len(line) + 1
