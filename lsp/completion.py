"""Completion: blocks, settings, values, units, dimensions of sweeps, names of datasets, constants and files."""

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Literal, get_args, get_origin

import attrs

from xtrain.dsl.schema import blocks
from xtrain.dsl.schema.actions import Tick
from xtrain.dsl.schema.component import registry_of
from xtrain.dsl.schema.data_components import SOURCES
from xtrain.dsl.schema.setting import Auto, Setting, file_path, open_setting, settings_of
from xtrain.dsl.spec_text import is_plain
from xtrain.dsl.syntax.tree import Token
from xtrain.dsl.user_parts.kinds import PART_KINDS
from xtrain.dsl.values import UNITS, Dimension, Metric, Quantity
from xtrain.lazy_attrs import frozen
from xtrain.lsp.analysis import Analysis
from xtrain.lsp.place import (
    WORDS,
    Place,
    Scope,
    Scopes,
    field_of,
    field_text,
    label_is_dataset,
    page_of,
    page_text,
    place_at,
    takes_datasets,
    word_line,
    words_of,
)

_MOST: Final = 200  # maximum of files offered
_MODEL: Final = blocks.KINDS["model"]  # their label is a family, or the folder of a model


def files_wanted(scopes: Scopes, scope: Scope, place: Place, path: str) -> tuple[str, tuple[str, ...]] | None:
    """Return the start folder of the path in a string, and its possible file endings (() for any); None if the string
    is not a path. path: of the spec."""
    first = place.item[0].type if place.item else ""
    ends = {"INCLUDE": (".xtrain",), "USE": (".py",)}.get(first)
    if ends is not None:
        return os.path.dirname(path), ends  # noqa: PTH120
    return (os.curdir, ()) if _is_path(scopes, scope, place) else None


def _is_path(scopes: Scopes, scope: Scope, place: Place) -> bool:
    """Return True if a string is a file of a source, or a label or setting that is a path."""
    called = scopes.called(place.inner) if place.inner.kind == "call" else None
    setting = scopes.setting(place)
    if called is not None and called.path in SOURCES and (setting is None or setting[0].path != called.path):
        return bool(SOURCES[called.path].sample)
    if setting is not None:
        found = scopes.attribute(*setting)
        return found is not None and found[1].check is file_path
    item = place.item
    block = scopes.block_of(scope, item[0].text) if len(item) == 1 and item[0].type in WORDS else None
    label = blocks.label_of(block) if block is not None else None
    return block is _MODEL or (label is not None and label.metadata.get("check") is file_path)


def files_beginning(written: str, base: str, ends: tuple[str, ...]) -> list[str]:
    """Return the names of files and folders (with a slash) that complete the last part of a path."""
    head, _, begun = written.rpartition("/")
    folder = os.path.join(base, head + "/" if written.startswith("/") else head)  # noqa: PTH118
    try:
        with os.scandir(folder or os.curdir) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except (OSError, ValueError):  # there is no such folder, or it is not a path
        return []
    names = []
    for entry in entries:
        hidden = entry.name.startswith(".") and not begun
        if entry.name.startswith(begun) and not hidden and (entry.is_dir() or entry.name.endswith(ends or "")):
            names.append(f"{entry.name}/" if entry.is_dir() else entry.name)
    return names[:_MOST]


# Form of the values → text to insert, and its meaning.
VALUES: Final = {
    "[…]": ("[", "these values"),
    "log": ("log(", "numbers between two ends, equally likely in the logarithm"),
    "uniform": ("uniform(", "numbers between two ends"),
}
_TRIALS_OWN: Final = ("workspace", "launch", "launcher", "sweep", "serve")  # trials cannot differ in these


def varies(scope: Scope) -> bool:
    """Return True if the items of a block may be `PATH in VALUES`."""
    free = open_setting(scope.block) if scope.block is not None else None
    return free is not None and Dimension in (free[0].type, *getattr(free[0].type, "__args__", ()))


def is_path(item: Sequence[Token]) -> bool:
    """Return True if the tokens of an item are empty or a path that ends with a dot."""
    return all(t.type in WORDS if number % 2 == 0 else t.type == "_DOT" for number, t in enumerate(item)) and (
        not item or item[-1].type == "_DOT"
    )


def next_steps(analysis: Analysis, item: Sequence[Token]) -> Iterator[tuple[str, str, str]]:
    """Yield the next steps of the path in an item: label, text, detail."""
    spec, before = analysis.spec, [token.text for token in item if token.type != "_DOT"]
    if not before:
        reading = analysis.loaded.reading
        for each in reading.definitions if reading is not None else ():
            if each.kind == "param":
                yield each.name.text, f"{each.name.text} in ", f"`param`, {each.expression.span.text}"
        for kind in blocks.KINDS:
            if kind not in _TRIALS_OWN:
                yield kind, f"{kind}.", "a setting of this block"
        return
    if before == ["dataset"] and spec is not None:
        yield from ((name, f"{name}.", "dataset") for name in spec.datasets if is_plain(name))
    block: Any = blocks.KINDS.get(before[0])
    given = getattr(spec, before[0], None)
    rest = before[2:] if before[0] == "dataset" else before[1:]
    if before == ["dataset"] or block is None:
        return
    block = type(given) if given is not None and attrs.has(type(given)) else block
    for name in rest:
        known = settings_of(block)
        if name not in known or not blocks.is_block(known[name][0].type):
            return
        block = known[name][0].type
    for name, (attribute, meta) in settings_of(block).items():
        is_block = blocks.is_block(attribute.type)
        yield name, f"{name}." if is_block else f"{name} in ", meta.doc


SuggestionKind = Literal["block", "setting", "value", "unit", "constant", "function", "statement", "file", "dataset"]


@frozen(kw_only=True)
class Suggestion:
    """A completion. text: replaces the text between the offsets `start` and `end`. doc: Markdown. order: lower values
    are listed first."""

    label: str
    kind: SuggestionKind
    text: str
    start: int
    end: int
    detail: str = ""
    doc: str = ""
    order: int = 5


def complete(analysis: Analysis, path: str, offset: int) -> list[Suggestion]:
    """Return completions at the cursor, the likeliest first; none inside a comment."""
    words = analysis.words(path)
    if words is None or words.in_comment(offset):
        return []
    place = place_at(words, offset)
    text = words.source.text
    if place.word is not None and place.word.text.startswith('"'):
        if offset == place.word.start or (offset == place.word.end and place.word.type == "STRING"):
            return []  # outside the quotes
        return list(_Completion(analysis, path, place, place.word.start + 1, offset).in_string(text))
    start = place.word.start if place.word is not None else offset
    end = place.word.end if place.word is not None else offset
    if place.word is not None and place.word.type == "NUMBER":
        return []  # its digits are being typed
    found = list(_Completion(analysis, path, place, start, end).run())
    return sorted({each.label: each for each in reversed(found)}.values(), key=lambda each: (each.order, each.label))


class _Completion:
    def __init__(self, analysis: Analysis, path: str, place: Place, start: int, end: int) -> None:
        self.analysis, self.path, self.place, self.start, self.end = analysis, path, place, start, end
        self.scopes = analysis.scopes
        self.scope = self.scopes.scope(place)

    def run(self) -> Iterator[Suggestion]:
        """Yield all completions at the place."""
        item, inner = self.place.item, self.place.inner
        setting = self.scopes.setting(self.place)
        if inner.kind == "map":
            if not item:
                yield from self._keys(setting)
            elif setting is not None:
                yield from self._values(*setting, item[2:] if item[1:] else ())
            return
        if inner.kind in ("call", "list"):
            if inner.kind == "call" and not item and self.scopes.called(inner) is not None:
                yield from self._settings(())
            if setting is not None:
                yield from self._values(*setting, item)
            else:
                yield from self._constants()
            return
        if varies(self.scope) and item and is_path(item):
            yield from self._steps(item)
        elif varies(self.scope) and item and item[-1].type == "IN":
            yield from (self._one(name, "function", text, detail=doc) for name, (text, doc) in VALUES.items())
        elif not item:
            yield from self._items()
        elif item[0].type in ("EVERY", "ON"):
            yield from self._trigger(item)
        elif item[0].type in ("LET", "PARAM"):
            if any(token.type == "_EQ" for token in item):
                yield from self._constants()
                yield from self._units(item, UNITS)
        elif setting is not None:
            yield from self._values(*setting, item[2:])
        elif item[0].type in WORDS and len(item) == 1:
            yield from self._labels(self.scopes.block_of(self.scope, item[0].text))

    # Names ------------------------------------------------------------------------------------------------------------

    def _items(self) -> Iterator[Suggestion]:
        if self.scope.block is None and not self.scope.path:
            for name in (*blocks.KINDS, "every", "on"):
                kind, text = ("block", name) if name in blocks.KINDS else ("statement", f"{name} ")
                page = page_of(name, blocks.KINDS.get(name))
                summary, about = (page.summary, page_text(page)) if page else ("", "")
                yield self._one(name, kind, text, detail=summary, doc=about)
            for name in ("let", "param", "include", "use"):
                yield self._one(name, "statement", f"{name} ", detail=word_line("statement", name))
            yield self._one("collate", "setting", "collate = ", detail=word_line("statement", "collate"))
            return
        given = self._given()
        yield from self._settings(given)
        if self.scope.has_weights:  # the name of a setting is never in quotes
            yield from (each for each in self._datasets(" = ") if each.label not in given and is_plain(each.label))
        if varies(self.scope):
            yield from self._steps(())

    def _steps(self, item: tuple[Token, ...]) -> Iterator[Suggestion]:
        """Yield the next steps of a sweep dimension's path."""
        for name, text, detail in next_steps(self.analysis, item):
            yield self._one(name, "block" if text.endswith(".") else "setting", text, detail=detail, order=6)

    def _given(self) -> set[str]:
        """Return the names already set in the block around the place."""
        words = self.analysis.words(self.path)
        opener = self.place.inner.opener
        if words is None or opener is None:
            return set()
        depth = opener.depth + 1
        inside: set[str] = set()
        for token in words.tokens:
            if token.start <= opener.start:
                continue
            if token.depth < depth:
                break
            if token.starts_item and token.depth == depth and token is not self.place.word:
                inside.add(token.text)
        return inside

    def _settings(self, given: Iterable[str]) -> Iterator[Suggestion]:
        scope = self.scope
        source = self.analysis.source(self.path)
        behind = source.text[self.end :].lstrip(" \t")[:1] if source is not None else ""
        for name, (attribute, meta) in scope.settings.items():
            if name in given:
                continue
            is_block = blocks.is_block(attribute.type)
            field = field_of(scope.path, scope.block, name, scope.label)
            inner = page_of(f"{scope.path}.{name}", attribute.type) if is_block else None
            doc = field_text(field) if field is not None else page_text(inner) if inner is not None else meta.doc
            required = attribute.default is attrs.NOTHING or scope.label in meta.required_by
            yield self._one(
                name,
                "block" if is_block else "setting",
                name if behind and behind in "={" else f"{name} " if is_block else f"{name} = ",
                detail=(inner.summary if inner is not None else field.kind if field is not None else "")
                + (" (must be given)" if required and not is_block else ""),
                doc=doc,
                order=1 if required else 5,
            )

    def _labels(self, block: type | None) -> Iterator[Suggestion]:
        """Yield the words that may follow a block's opening word."""
        if block is None:
            return
        label = blocks.label_of(block)
        if label_is_dataset(block):
            yield from self._datasets()
        registry = registry_of(block)
        for name, component in (registry or {}).items():
            yield self._one(name, "value", detail=" ".join((component.__doc__ or "").split()))
        if label is not None and registry is None:
            yield from self._words(label.type, Setting(doc=""))
            if int in get_args(label.type) or label.type is int:
                yield from self._constants(functions=False)
        for name, part in self.scopes.parts.items():
            if blocks.KINDS.get(PART_KINDS[part.declared.kind].block) is block:
                yield self._one(name, "value", detail=part.declared.does, order=2)

    def _trigger(self, item: tuple[Token, ...]) -> Iterator[Suggestion]:
        """Yield completions after `every` or `on`: a period or an event, then actions and their labels."""
        at = self.scopes.action(item)
        if at is not None:
            name = item[at].text
            if at == len(item) - 1:
                yield from self._labels(self.scopes.parts.actions().get(name))
            if self.place.word is not None or item[-1].span.end <= self.start:
                yield self._one("then", "statement", "then ", detail="another action in the same step", order=8)
            return
        if len(item) == 1:
            if item[0].type == "ON":
                for event in words_of("event"):
                    yield self._one(event.name, "value", f"{event.name} ", detail=event.meaning)
            else:
                yield self._one("step", "unit", "step ", detail="after every step")
                yield from self._constants()
            return
        if item[-1].type == "NUMBER" and not isinstance(item[-1].value, Quantity):
            yield from self._units(item, settings_of(Tick)["every"][1].units)
        for name, action in self.scopes.parts.actions().items():
            page = page_of(name, action)
            yield self._one(name, "function", detail=page.summary if page else "", doc=page_text(page) if page else "")

    def _keys(self, setting: tuple[Scope, str] | None) -> Iterator[Suggestion]:
        if setting is not None and takes_datasets(self.scopes.attribute(*setting)):
            yield from self._datasets(": ")

    # Values -----------------------------------------------------------------------------------------------------------

    def _values(self, scope: Scope, name: str, before: tuple[Token, ...]) -> Iterator[Suggestion]:
        """Yield the values of a setting. before: tokens of its value before the place."""
        for registry in self.scopes.calls((scope, name)):
            for call, component in registry.items():
                page = page_of(call, component)
                detail = page.summary if page else ""
                yield self._one(call, "function", registry.form(call), detail=detail, order=2)
            yield from self._parts_of(registry.word)
        if scope.block is None and name == "collate":
            return
        found = self.scopes.attribute(scope, name)
        if found is None:
            yield from self._constants()
            return
        attribute, meta = found
        if before and before[-1].type == "NUMBER" and not isinstance(before[-1].value, Quantity):
            yield from self._units(before, meta.units)
            return
        yield from self._words(attribute.type, meta)
        yield from self._constants()

    def _words(self, annotation: Any, meta: Setting) -> Iterator[Suggestion]:
        """Yield the fixed words, calls and names that are values of a type."""
        choices = blocks.choices_of(annotation)
        for word in meta.registry or choices:
            text = word if word.isidentifier() or word == "1f1b" else f'"{word}"'
            yield self._one(word, "value", text, order=2)
        parts = (annotation, *get_args(annotation))
        if bool in parts:
            yield from (self._one(word, "value", order=2) for word in ("true", "false"))
        if Auto in parts:
            yield self._one("auto", "value", detail=word_line("constant", "auto"), order=2)
        if type(None) in parts:
            yield self._one("none", "value", detail=word_line("constant", "none"), order=2)
        if Metric in parts:
            for dataset in filter(is_plain, self._dataset_names()):
                yield self._one(f"eval.{dataset}.loss", "value", order=2)
        listed = next((part for part in parts if get_origin(part) is tuple), None)
        if meta.example and not choices and (listed is not None or bool not in parts):
            yield self._one(meta.example, "value", detail="an example", order=3)

    def _units(self, before: tuple[Token, ...], units: Iterable[str]) -> Iterator[Suggestion]:
        """Yield the units that may follow a number."""
        if not before or before[-1].type != "NUMBER" or isinstance(before[-1].value, Quantity):
            return
        stored = {UNITS[unit][0] if unit in UNITS else unit for unit in units}
        for unit, (kind, _) in UNITS.items():
            if kind in stored and unit.endswith("s") >= (kind in ("steps", "tokens", "epochs", "samples")):
                yield self._one(unit, "unit", detail=word_line("unit", unit), order=2)

    def _constants(self, *, functions: bool = True) -> Iterator[Suggestion]:
        reading = self.analysis.loaded.reading
        for source, names in zip(self.analysis.loaded.sources, reading.files if reading else (), strict=False):
            if source.path == self.path:
                for name, definition in names.all.items():
                    yield self._one(name, "constant", detail=definition.expression.span.text, order=4)
        for function in words_of("function") if functions else ():
            yield self._one(function.name, "function", f"{function.name}(", detail=function.meaning, order=9)

    def _dataset_names(self) -> list[str]:
        spec = self.analysis.spec
        return list(spec.datasets) if spec is not None else []

    def _datasets(self, behind: str = "") -> Iterator[Suggestion]:
        for name in self._dataset_names():
            shown = name if is_plain(name) else f'"{name}"'
            yield self._one(name, "dataset", f"{shown}{behind}", detail="dataset", order=1)

    def _parts_of(self, kind: str) -> Iterator[Suggestion]:
        for name, part in self.scopes.parts.items():
            if part.declared.kind == kind:
                yield self._one(name, "function", part.form(), detail=part.declared.does, order=2)

    # Strings ----------------------------------------------------------------------------------------------------------

    def in_string(self, text: str) -> Iterator[Suggestion]:
        """Yield the files, folders or dataset names that complete the string before the cursor."""
        item = self.place.item
        wanted = files_wanted(self.scopes, self.scope, self.place, self.path)
        if wanted is not None:
            written = text[self.start : self.end]
            start = self.end - len(written.rpartition("/")[2])
            for name in files_beginning(written, *wanted):
                yield Suggestion(label=name, kind="file", text=name, start=start, end=self.end)
        elif item and item[0].type in ("EVERY", "ON"):
            at = self.scopes.action(item)
            action = self.scopes.parts.actions().get(item[at].text) if at is not None else None
            if label_is_dataset(action):
                yield from (self._one(name, "dataset") for name in self._dataset_names())

    def _one(
        self,
        label: str,
        kind: SuggestionKind,
        text: str | None = None,
        *,
        detail: str = "",
        doc: str = "",
        order: int = 5,
    ) -> Suggestion:
        text = label if text is None else text
        return Suggestion(
            label=label, kind=kind, text=text, start=self.start, end=self.end, detail=detail, doc=doc, order=order
        )
