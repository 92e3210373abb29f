"""What is known of the specs that are open: each with its files, diagnostics and, on request, its plan."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Lock
from typing import Any, Final

from attrs import define, field

from xtrain.dsl.diagnostics.diagnostic import Diagnostic, Diagnostics
from xtrain.dsl.diagnostics.source import SourceText
from xtrain.dsl.evaluation.includes import LARGEST
from xtrain.dsl.load import Loaded, load_spec
from xtrain.dsl.spec import Spec
from xtrain.lsp.place import Words
from xtrain.lsp.scope import Scopes
from xtrain.planner.load import check_loaded, plan_from_loaded
from xtrain.planner.plan import Plan
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
