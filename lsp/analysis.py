"""Analysis of open specs: files, diagnostics, plan on request, outline, and corrections."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Lock
from typing import Any, Final

from attrs import field

from xtrain.dsl.autofix import apply_fixes
from xtrain.dsl.diagnostics.diagnostic import Diagnostic, Diagnostics, SourceText, Span
from xtrain.dsl.evaluation.statements import LARGEST
from xtrain.dsl.load import Loaded, load_spec
from xtrain.dsl.schema.model import executing_nothing
from xtrain.dsl.spec import Spec
from xtrain.dsl.syntax import tree as s
from xtrain.lazy_attrs import define, frozen
from xtrain.lsp.place import Scopes, Words
from xtrain.plan.plan import Plan
from xtrain.planner.load import check_from_spec, check_loaded, plan_from_loaded
from xtrain.regular_files import read_regular

_INCLUDE: Final = re.compile(r'^[ \t]*include[ \t]+"([^"\n]+)"', re.MULTILINE)
_SIBLINGS: Final = 200  # specs of a folder searched for includers of a file


@define(eq=False)
class Analysis:
    """A spec with all included files, as in the editor. root: the path of the spec."""

    root: str
    loaded: Loaded
    diagnostics: Diagnostics
    _words: dict[str, Words] = field(factory=dict)
    _plan: list[Plan | None] = field(factory=list)
    _planning: Any = field(factory=Lock, repr=False)

    @classmethod
    def of(cls, root: str, texts: Mapping[str, str]) -> "Analysis":
        """Load and check the spec at `root`. texts: path → text of open files."""
        with executing_nothing():
            loaded = load_spec(root, (), texts)
            return cls(root, loaded, check_loaded(loaded))

    @property
    def spec(self) -> Spec | None:
        """The spec, or the part of it that is valid."""
        return self.loaded.spec or self.loaded.draft

    @property
    def scopes(self) -> Scopes:
        return Scopes(self.loaded.parts)

    def source(self, path: str) -> SourceText | None:
        """Return the text of a file of the spec."""
        return next((each for each in self.loaded.sources if each.path == path), None)

    def words(self, path: str) -> Words | None:
        """Return the tokens of a file of the spec."""
        if path not in self._words:
            source = self.source(path)
            if source is None:
                return None
            self._words[path] = Words.of(source)
        return self._words[path]

    def plan(self) -> Plan | None:
        """Return the plan; None for a spec with errors. The first call takes some tens of milliseconds."""
        with self._planning:
            if not self._plan:
                with executing_nothing():
                    compiled = None if self.diagnostics.has_errors else plan_from_loaded(self.loaded)
                self._plan.append(compiled.plan if compiled is not None else None)
            return self._plan[0]

    @property
    def known_plan(self) -> Plan | None:
        """The plan, if it was compiled already."""
        return self._plan[0] if self._plan else None

    def by_file(self) -> dict[str, list[Diagnostic]]:
        """Return the diagnostics of each file of the spec; those without a place belong to the spec itself."""
        found: dict[str, list[Diagnostic]] = {self.root: [], **{each.path: [] for each in self.loaded.sources}}
        for diagnostic in self.diagnostics:
            path = diagnostic.span.source.path if diagnostic.span is not None else self.root
            found.setdefault(path, []).append(diagnostic)
        return found


class OpenSpecs:
    """Open texts, and an analysis of each of their specs, made on first use."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self._analyses: dict[str, Analysis] = {}
        self._on_disk: dict[str, tuple[int, list[str]]] = {}  # path → its modification time and included files

    def open(self, path: str, text: str) -> None:
        """Set the text of an opened or changed file."""
        self.texts[path] = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
        self._forget(path)

    def close(self, path: str) -> None:
        """Forget an open file's text; the file on disk applies again."""
        self.texts.pop(path, None)
        self._forget(path)

    def changed_on_disk(self, path: str) -> None:
        """Forget a file that changed on disk."""
        self._forget(path)

    def analysis(self, path: str) -> Analysis:
        """Return the analysis of the spec that a file belongs to: the file itself, unless another spec includes it."""
        root = self.root(path)
        if root not in self._analyses:
            self._analyses[root] = Analysis.of(root, self.texts)
        return self._analyses[root]

    def roots(self) -> list[str]:
        """Return the specs of all open files."""
        return list(dict.fromkeys(self.root(path) for path in self.texts))

    def root(self, path: str) -> str:
        """Return the spec that a file belongs to. If there are several, prefer an open one, then the first in its
        folder."""
        seen = [path]
        while (above := next((each for each in self._includers(seen[-1]) if each not in seen), None)) is not None:
            seen.append(above)
        return seen[-1]

    def _includers(self, path: str) -> Iterator[str]:
        """Yield the files that include this one, among open files and the files of its folder."""
        beside = []
        if os.path.isabs(path):  # noqa: PTH117
            try:
                beside = sorted(str(each) for each in Path(path).parent.glob("*.xtrain"))[:_SIBLINGS]
            except OSError:
                beside = []
        for each in dict.fromkeys([*self.texts, *beside]):
            if each != path and path in self._included(each):
                yield each

    def _included(self, path: str) -> list[str]:
        """Return the files that a text includes."""
        if path in self.texts:
            return _targets(path, self.texts[path])
        try:
            changed = Path(path).stat().st_mtime_ns
            if self._on_disk.get(path, (None,))[0] != changed:
                self._on_disk[path] = changed, _targets(path, read_regular(path, LARGEST).decode())
        except (OSError, UnicodeDecodeError):
            return []
        return self._on_disk[path][1]

    def _forget(self, path: str) -> None:
        """Drop the analyses that a file is part of, or may now be part of."""
        for root, analysis in list(self._analyses.items()):
            parts = {root, *(source.path for source in analysis.loaded.sources)}
            if path in parts or path.endswith(".py") or analysis.diagnostics.has_errors:
                del self._analyses[root]


def _targets(path: str, text: str) -> list[str]:
    folder = os.path.dirname(path)  # noqa: PTH120
    return [os.path.normpath(os.path.join(folder, target)) for target in _INCLUDE.findall(text)]  # noqa: PTH118


@frozen
class Symbol:
    """A symbol. kind: `block`, `setting`, `constant`, `file`, `event`. span: the whole symbol. name_span: its name."""

    name: str
    kind: str
    span: Span
    name_span: Span
    detail: str = ""
    inner: tuple["Symbol", ...] = ()


def symbols(analysis: Analysis, path: str) -> list[Symbol]:
    """Return the outline of a file of the spec; empty if its blocks nest deeper than Python's stack (X130)."""
    reading = analysis.loaded.reading
    tree = next((each for each in reading.trees if each.source.path == path), None) if reading is not None else None
    try:
        return [found for item in (tree.items if tree is not None else ()) for found in _symbol(item)]
    except RecursionError:
        return []


def _symbol(item: s.Item) -> list[Symbol]:
    match item:
        case s.Block(kind=kind, labels=labels, body=body, span=span):
            name = " ".join([kind.text, *(label.span.text for label in labels)])
            inner = tuple(found for each in (body.items if body is not None else ()) for found in _symbol(each))
            return [Symbol(name, "block", span, kind.span, inner=inner)]
        case s.Assign(name=name, value=value, span=span):
            return [Symbol(name.text, "setting", span, name.span, _line(value.span.text))]
        case s.Let(name=name, value=value, span=span) | s.Param(name=name, value=value, span=span):
            return [Symbol(name.text, "constant", span, name.span, _line(value.span.text))]
        case s.Include(path=target, span=span):
            return [Symbol(target.value or '""', "file", span, target.span, "include")]
        case s.Use(target=target, span=span):
            return [Symbol(target.span.text, "file", span, target.span, "use")]
        case s.Every(span=span, period=period, actions=actions):
            return [Symbol(f"every {_line(period.span.text)}", "event", span, period.span, _actions(actions))]
        case s.On(span=span, event=event, actions=actions):
            return [Symbol(f"on {event.text}", "event", span, event.span, _actions(actions))]
        case _:
            return []


def _actions(actions: tuple[s.Block, ...]) -> str:
    heads = (" ".join([each.kind.text, *(label.span.text for label in each.labels)]) for each in actions)
    return " then ".join(heads)


def _line(text: str) -> str:
    """Return a text in one short line."""
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:59] + "…"


@frozen
class Correction:
    """A code action. title: for people. edits: replacements of spans. of: the corrected diagnostic; None: several."""

    title: str
    edits: tuple[tuple[Span, str], ...]
    of: Diagnostic | None = None


def corrections(analysis: Analysis, path: str, start: int, end: int) -> list[Correction]:
    """Return the corrections of diagnostics between two offsets."""
    found = []
    for diagnostic in analysis.diagnostics:
        span, fix = diagnostic.span, diagnostic.fix
        if span is None or fix is None or span.source.path != path or span.start > end or span.end < start:
            continue
        found.append(Correction(_title(fix.span.text, fix.text), ((fix.span, fix.text),), diagnostic))
    return found


def all_corrections(analysis: Analysis) -> Correction | None:
    """Return all safe corrections of `--fix` in all files; None if there are none."""
    if not any(diagnostic.fix for diagnostic in analysis.diagnostics):
        return None
    texts = {source.path: source.text for source in analysis.loaded.sources}
    with executing_nothing():
        fixed = apply_fixes(lambda changed: check_from_spec(analysis.root, (), {**texts, **changed}))
    edits = []
    for source in analysis.loaded.sources:
        text = fixed.texts.get(source.path, source.text)
        if text != source.text:
            edits.append((Span(source, 0, len(source.text)), text))
    return Correction("Apply all certain fixes", tuple(edits)) if edits else None


def _title(old: str, new: str) -> str:
    old, new = (" ".join(text.split()) for text in (old, new))
    if not old:
        return f"Add `{new}`"
    return f"Replace `{old}` with `{new}`" if new else f"Remove `{old}`"
