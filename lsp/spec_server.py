"""State of the language server: open texts, published diagnostics, and values in the protocol's form.

An editor counts lines and columns in its own units; `Positions` converts them.
"""

import asyncio
import os
import re
import tempfile
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from lsprotocol import types as t
from pygls.lsp.server import LanguageServer
from pygls.protocol import LanguageServerProtocol, lsp_method
from pygls.uris import from_fs_path, to_fs_path

from xtrain.dsl.diagnostics.diagnostic import Diagnostic, SourceText, Span
from xtrain.lsp.analysis import Analysis, Correction, OpenSpecs, Symbol
from xtrain.lsp.place import code_page, read_reference
from xtrain.plan.plan import Plan
from xtrain.version import __version__

# Encoding of the protocol → code units of a character.
_UNITS: Final = {
    "utf-8": lambda c: len(c.encode(errors="surrogatepass")),
    "utf-16": lambda c: 2 if ord(c) > 0xFFFF else 1,
    "utf-32": lambda c: 1,
}
_LINE_END: Final = re.compile(r"\r\n|\r|\n")  # the protocol's line ends: `str.splitlines` has more


class Positions:
    """Converts between offsets and positions: line and character from 0, the character in units of the encoding.
    encoding: `utf-8`, `utf-16` or `utf-32`."""

    def __init__(self, encoding: str = "utf-16") -> None:
        self.units = _UNITS[encoding]

    def position(self, source: SourceText, offset: int) -> t.Position:
        """Return the position of an offset."""
        line, column = source.position(offset)
        start = source.line_start(line)
        text = source.text[start : start + column - 1]
        return t.Position(line - 1, len(text) if text.isascii() else sum(map(self.units, text)))

    def extent(self, span: Span) -> t.Range:
        """Return the range of a span."""
        return t.Range(self.position(span.source, span.start), self.position(span.source, span.end))

    def offset(self, source: SourceText, position: t.Position) -> int:
        """Return the offset of a position; past the end of a line or of the text, that end."""
        line, character = position.line, position.character
        if line >= source.position(len(source.text))[0]:
            return len(source.text)
        text = source.line(line + 1)
        column = 0
        while column < len(text) and character > 0:
            character -= self.units(text[column])
            column += 1
        return source.line_start(line + 1) + column

    def replaced(self, text: str, extent: t.Range, new: str) -> str:
        """Return the text with `new` instead of the text in a range; line ends may be of any kind."""
        ends = [(match.start(), match.end()) for match in _LINE_END.finditer(text)]
        first, last = (self._place(text, ends, each) for each in (extent.start, extent.end))
        return text[:first] + new + text[max(first, last) :]

    def _place(self, text: str, ends: list[tuple[int, int]], position: t.Position) -> int:
        """Return the offset of a position. ends: for each line but the last, its end and the start of the next line."""
        line, character = position.line, position.character
        if line > len(ends):
            return len(text)
        place = ends[line - 1][1] if line else 0
        stop = ends[line][0] if line < len(ends) else len(text)
        while place < stop and character > 0:
            character -= self.units(text[place])
            place += 1
        return place


QUIET: Final = 0.2  # seconds without a change before a plan is compiled
_SYMBOL_KINDS: Final = {
    "block": t.SymbolKind.Class,
    "setting": t.SymbolKind.Property,
    "constant": t.SymbolKind.Constant,
    "file": t.SymbolKind.File,
    "event": t.SymbolKind.Event,
}


class SpecProtocol(LanguageServerProtocol):
    """The protocol of pygls, with text changes applied by this server. pygls also ends lines at a form feed or U+2028,
    and moves the message's positions that lie past the end of such a line."""

    @lsp_method(t.TEXT_DOCUMENT_DID_CHANGE)
    def lsp_text_document__did_change(self, params: t.DidChangeTextDocumentParams) -> Generator[Any, None, None]:
        handler = self.fm.features.get(t.TEXT_DOCUMENT_DID_CHANGE)
        if handler is not None:
            yield handler, (params,), None


class SpecServer(LanguageServer):
    """The language server. specs: texts and analyses. published: root of a spec → files with published diagnostics."""

    def __init__(self) -> None:
        super().__init__("xtrain", __version__, protocol_cls=SpecProtocol)
        self.specs = OpenSpecs()
        self.positions = Positions()
        self.published: dict[str, dict[str, list[Diagnostic]]] = {}
        # Open files, by the editor's URI.
        self.paths: dict[str, str] = {}
        self.texts: dict[str, str] = {}
        self.versions: dict[str, int] = {}
        self.pending: asyncio.TimerHandle | None = None
        self.planner = ThreadPoolExecutor(1, "plan")
        self.pages = tempfile.TemporaryDirectory(prefix="xtrain-codes-")

    # Texts ------------------------------------------------------------------------------------------------------------

    def opened(self, uri: str, version: int, text: str) -> None:
        """Set the text of a file opened in the editor."""
        self.paths[uri] = os.path.normpath(to_fs_path(uri) or uri)
        self._take(uri, version, text)

    def changed(self, uri: str, version: int, changes: Iterable[t.TextDocumentContentChangeEvent]) -> None:
        """Apply the editor's changes to an open file; ignore other files."""
        text = self.texts.get(uri)
        if text is None:
            return
        for change in changes:
            if isinstance(change, t.TextDocumentContentChangePartial):
                text = self.positions.replaced(text, change.range, change.text)
            else:
                text = change.text
        self._take(uri, version, text)

    def closed(self, uri: str) -> None:
        """Forget an open file."""
        path = self.paths.pop(uri, None)
        if path is not None:
            del self.texts[uri], self.versions[uri]
            self.specs.close(path)
            self.check_soon()

    def _take(self, uri: str, version: int, text: str) -> None:
        """Set the text of an open file, and check its spec after all pending changes."""
        self.texts[uri], self.versions[uri] = text, version
        self.specs.open(self.paths[uri], text)
        self.check_soon()

    def check_soon(self) -> None:
        if self.pending is not None:
            self.pending.cancel()
        self.pending = asyncio.get_running_loop().call_later(0, self.check)

    def check(self) -> None:
        """Publish the diagnostics of all open specs."""
        self.pending = None
        found: dict[str, dict[str, list[Diagnostic]]] = {}
        for root in self.specs.roots():
            found[root] = self.specs.analysis(root).by_file()
        new, old = _of_files(found), _of_files(self.published)
        for path in dict.fromkeys((*new, *old)):
            if new.get(path) != old.get(path) or path in self.specs.texts:
                self._publish(path, new.get(path, []))
        if not self.published:  # so that the first completion and hover do not wait for it
            asyncio.get_running_loop().call_later(QUIET, read_reference)
        self.published = found

    def _publish(self, path: str, found: list[Diagnostic]) -> None:
        uri = self.uri(path)
        shown = [self.diagnostic(each) for each in found]
        self.text_document_publish_diagnostics(t.PublishDiagnosticsParams(uri, shown, self.versions.get(uri)))

    def analysis(self, uri: str) -> tuple[Analysis, str, SourceText] | None:
        """Return the analysis of the spec that an open file belongs to, its path and its text."""
        path = self.paths.get(uri)
        if path is None:
            return None
        analysis = self.specs.analysis(path)
        source = analysis.source(path)
        if source is None:  # a broken or circular include: the file is analyzed on its own
            analysis = Analysis.of(path, self.specs.texts)
            source = analysis.source(path)
        return None if source is None else (analysis, path, source)

    async def plan(self, analysis: Analysis, *, quiet: float = 0) -> Plan | None:
        """Return the plan of a spec, unless its text changes meanwhile. quiet: seconds to wait for a change."""
        if analysis.known_plan is None:
            await asyncio.sleep(quiet)
            if self.specs.analysis(analysis.root) is not analysis:
                return None
            await asyncio.get_running_loop().run_in_executor(self.planner, analysis.plan)
        return analysis.known_plan

    def uri(self, path: str) -> str:
        """Return the URI of a file, as written by the editor if the file is open."""
        known = next((uri for uri, each in self.paths.items() if each == path), None)
        return known or from_fs_path(os.path.abspath(path)) or path  # noqa: PTH100

    # Answers ----------------------------------------------------------------------------------------------------------

    def range(self, span: Span) -> t.Range:
        return self.positions.extent(span)

    def location(self, span: Span) -> t.Location:
        return t.Location(self.uri(span.source.path), self.range(span))

    def diagnostic(self, found: Diagnostic) -> t.Diagnostic:
        """Convert a diagnostic to the protocol: the hint is in the message, and notes with a place are related
        information."""
        notes = [
            t.DiagnosticRelatedInformation(self.location(span), message) for message, span in found.all_notes if span
        ]
        unplaced = [f"note: {message}" for message, span in found.all_notes if span is None]
        hint = [f"hint: {found.hint}"] if found.hint else []
        nowhere = t.Range(t.Position(0, 0), t.Position(0, 0))
        unused = found.code in ("W201", "W202", "W204")
        return t.Diagnostic(
            range=self.range(found.span) if found.span is not None else nowhere,
            message="\n".join([found.message, *hint, *unplaced]),
            severity=t.DiagnosticSeverity.Error if found.severity == "error" else t.DiagnosticSeverity.Warning,
            code=found.code,
            code_description=t.CodeDescription(self.page(found.code)),
            source="xtrain",
            related_information=notes or None,
            tags=[t.DiagnosticTag.Unnecessary] if unused else None,
        )

    def page(self, code: str) -> str:
        """Return the URI of a code's page, which is written on first use."""
        file = Path(self.pages.name, f"{code}.md")
        if not file.exists():
            file.write_text(code_page(code) or f"# {code}\n", encoding="utf-8")
        return file.as_uri()

    def edit(self, edits: Iterable[tuple[Span, str]]) -> t.WorkspaceEdit:
        found: dict[str, list[t.TextEdit]] = {}
        for span, text in edits:
            found.setdefault(self.uri(span.source.path), []).append(t.TextEdit(self.range(span), text))
        return t.WorkspaceEdit(changes=found)

    def symbol(self, symbol: Symbol) -> t.DocumentSymbol:
        return t.DocumentSymbol(
            name=symbol.name,
            kind=_SYMBOL_KINDS[symbol.kind],
            range=self.range(symbol.span),
            selection_range=self.range(symbol.name_span),
            detail=symbol.detail or None,
            children=[self.symbol(each) for each in symbol.inner],
        )

    def action(self, change: Correction, kind: t.CodeActionKind) -> t.CodeAction:
        of = [self.diagnostic(change.of)] if change.of is not None else None
        preferred = change.of is not None
        return t.CodeAction(
            change.title, kind=kind, diagnostics=of, is_preferred=preferred, edit=self.edit(change.edits)
        )


def _of_files(found: dict[str, dict[str, list[Diagnostic]]]) -> dict[str, list[Diagnostic]]:
    """Return the diagnostics of each file over all specs that it belongs to, without duplicates."""
    merged: dict[str, list[Diagnostic]] = {}
    for files in found.values():
        for path, diagnostics in files.items():
            known = merged.setdefault(path, [])
            known += [each for each in diagnostics if each not in known]
    return merged
