"""`xtrain lsp`: the language server. Turns requests of an editor into calls of this folder, and their answers back.

Everything is answered from the analysis of the current text; what a request asks of the plan is computed in a thread,
when nothing has been typed for a while, so that diagnostics never wait for it.
"""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from lsprotocol import types as t
from pygls.lsp.server import LanguageServer
from pygls.uris import from_fs_path, to_fs_path

from ..dsl.diagnostics.diagnostic import Diagnostic, SpecErrors
from ..dsl.diagnostics.source import SourceText, Span
from ..dsl.syntax.format import FormatFault, format_source
from ..planner.plan import Plan
from .analysis import Analysis, OpenSpecs
from .completion import complete
from .derived import hints
from .fixes import Correction, all_corrections, corrections
from .highlight import KINDS, colored
from .hover import hover
from .names import RENAMED, RenameRefused, definitions, occurrence_at, references, rename
from .positions import Extent, Positions, TextPosition
from .reference import code_page, read_reference
from .symbols import Symbol, symbols

QUIET: Final = 0.2  # seconds without a change after which a plan is made
_COMPLETION_KINDS: Final = {
    "block": t.CompletionItemKind.Class,
    "setting": t.CompletionItemKind.Property,
    "value": t.CompletionItemKind.EnumMember,
    "unit": t.CompletionItemKind.Unit,
    "constant": t.CompletionItemKind.Constant,
    "function": t.CompletionItemKind.Function,
    "statement": t.CompletionItemKind.Keyword,
    "file": t.CompletionItemKind.File,
    "dataset": t.CompletionItemKind.Reference,
}
_SYMBOL_KINDS: Final = {
    "block": t.SymbolKind.Class,
    "setting": t.SymbolKind.Property,
    "constant": t.SymbolKind.Constant,
    "file": t.SymbolKind.File,
    "event": t.SymbolKind.Event,
}


class SpecServer(LanguageServer):
    """specs: the texts and analyses. published: root of a spec → the files that it has diagnostics of."""

    def __init__(self) -> None:
        super().__init__("xtrain", version("xtrain"), text_document_sync_kind=t.TextDocumentSyncKind.Incremental)
        self.specs = OpenSpecs()
        self.positions = Positions()
        self.published: dict[str, dict[str, list[Diagnostic]]] = {}
        self.paths: dict[str, str] = {}  # uri as the editor writes it → path, of the files that are open
        self.pending: asyncio.TimerHandle | None = None
        self.planner = ThreadPoolExecutor(1, "plan")
        self.pages = Path(tempfile.mkdtemp(prefix="xtrain-codes-"))

    # Texts ------------------------------------------------------------------------------------------------------------

    def changed(self, uri: str) -> None:
        """Take the text of an open file, and check its spec once the changes that wait have been taken too."""
        path = self.paths[uri]
        self.specs.open(path, self.workspace.get_text_document(uri).source)
        self.check_soon()

    def check_soon(self) -> None:
        if self.pending is not None:
            self.pending.cancel()
        self.pending = asyncio.get_running_loop().call_later(0, self.check)

    def check(self) -> None:
        """Publish the diagnostics of all specs that are open."""
        self.pending = None
        found: dict[str, dict[str, list[Diagnostic]]] = {}
        for root in self.specs.roots():
            found[root] = self.specs.analysis(root).by_file()
        new, old = _of_files(found), _of_files(self.published)
        for path in dict.fromkeys((*new, *old)):
            if new.get(path) != old.get(path) or path in self.specs.texts:
                self._publish(path, new.get(path, []))
        if not self.published:  # the first completion and hover need not wait for it then
            asyncio.get_running_loop().call_later(QUIET, read_reference)
        self.published = found

    def _publish(self, path: str, found: list[Diagnostic]) -> None:
        uri = self.uri(path)
        document = self.workspace.text_documents.get(uri)
        shown = [self.diagnostic(each) for each in found]
        self.text_document_publish_diagnostics(
            t.PublishDiagnosticsParams(uri=uri, diagnostics=shown, version=document.version if document else None)
        )

    def analysis(self, uri: str) -> tuple[Analysis, str, SourceText] | None:
        """The analysis of the spec that an open file is part of, its path and its text."""
        path = self.paths.get(uri)
        if path is None:
            return None
        analysis = self.specs.analysis(path)
        source = analysis.source(path)
        if source is None:  # an include that is broken off, or leads back: on its own, the file can be understood
            analysis = Analysis.of(path, self.specs.texts)
            source = analysis.source(path)
        return None if source is None else (analysis, path, source)

    async def plan(self, analysis: Analysis, *, quiet: float = 0) -> Plan | None:
        """The plan of a spec, unless its text changes meanwhile. quiet: seconds to wait for such a change."""
        if analysis.known_plan is None:
            await asyncio.sleep(quiet)
            if self.specs.analysis(analysis.root) is not analysis:
                return None
            await asyncio.get_running_loop().run_in_executor(self.planner, analysis.plan)
        return analysis.known_plan

    def uri(self, path: str) -> str:
        """The URI of a file, as the editor writes it if the file is open."""
        known = next((uri for uri, each in self.paths.items() if each == path), None)
        return known or from_fs_path(os.path.abspath(path)) or path  # noqa: PTH100

    # Answers ----------------------------------------------------------------------------------------------------------

    def range(self, span: Span) -> t.Range:
        return _range(self.positions.extent(span))

    def location(self, span: Span) -> t.Location:
        return t.Location(self.uri(span.source.path), self.range(span))

    def diagnostic(self, found: Diagnostic) -> t.Diagnostic:
        """As the protocol has it: the hint is in the message, and notes with a place are related information."""
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
        """The URI of the page of a code, which is written when it is first needed."""
        file = self.pages / f"{code}.md"
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
    """The diagnostics of each file, of all specs that it is part of, each once."""
    merged: dict[str, list[Diagnostic]] = {}
    for files in found.values():
        for path, diagnostics in files.items():
            known = merged.setdefault(path, [])
            known += [each for each in diagnostics if each not in known]
    return merged


def _range(extent: Extent) -> t.Range:
    return t.Range(t.Position(*extent.start), t.Position(*extent.end))


def _at(position: t.Position) -> TextPosition:
    return TextPosition(position.line, position.character)


def make_server() -> SpecServer:
    """The server with all that it answers."""
    server = SpecServer()
    _lifetime(server)
    _texts(server)
    _reading(server)
    _writing(server)
    return server


def _lifetime(server: SpecServer) -> None:
    @server.feature(t.INITIALIZE)
    def initialize(params: t.InitializeParams) -> None:
        folders = params.workspace_folders or []
        uri = folders[0].uri if folders else params.root_uri
        root = to_fs_path(uri) if uri else None
        if root is not None and Path(root).is_dir():
            os.chdir(root)  # the paths of data are relative to the working folder
        server.positions = Positions(t.PositionEncodingKind(server.workspace.position_encoding).value)

    @server.feature(t.SHUTDOWN)
    def shutdown(params: None) -> None:
        server.planner.shutdown(wait=False, cancel_futures=True)
        shutil.rmtree(server.pages, ignore_errors=True)


def _texts(server: SpecServer) -> None:
    @server.feature(t.TEXT_DOCUMENT_DID_OPEN)
    def opened(params: t.DidOpenTextDocumentParams) -> None:
        uri = params.text_document.uri
        server.paths[uri] = os.path.normpath(to_fs_path(uri) or uri)
        server.changed(uri)

    @server.feature(t.TEXT_DOCUMENT_DID_CHANGE)
    def changed(params: t.DidChangeTextDocumentParams) -> None:
        server.changed(params.text_document.uri)

    @server.feature(t.TEXT_DOCUMENT_DID_CLOSE)
    def closed(params: t.DidCloseTextDocumentParams) -> None:
        path = server.paths.pop(params.text_document.uri, None)
        if path is not None:
            server.specs.close(path)
            server.check_soon()

    @server.feature(t.WORKSPACE_DID_CHANGE_WATCHED_FILES)
    def watched(params: t.DidChangeWatchedFilesParams) -> None:
        for change in params.changes:
            server.specs.changed_on_disk(os.path.normpath(to_fs_path(change.uri) or change.uri))
        server.check_soon()


def _reading(server: SpecServer) -> None:
    """What is asked of a text, and does not change it."""

    @server.feature(t.TEXT_DOCUMENT_HOVER)
    async def hovered(params: t.HoverParams) -> t.Hover | None:
        found = server.analysis(params.text_document.uri)
        if found is None:
            return None
        analysis, path, source = found
        plan = await server.plan(analysis)
        text = hover(analysis, path, server.positions.offset(source, _at(params.position)), plan)
        if text is None:
            return None
        return t.Hover(t.MarkupContent(t.MarkupKind.Markdown, text.text), server.range(text.span))

    @server.feature(t.TEXT_DOCUMENT_INLAY_HINT)
    async def hinted(params: t.InlayHintParams) -> list[t.InlayHint]:
        found = server.analysis(params.text_document.uri)
        if found is None:
            return []
        analysis, path, source = found
        await server.plan(analysis, quiet=QUIET)
        first, last = (server.positions.offset(source, _at(each)) for each in (params.range.start, params.range.end))
        shown = [each for each in hints(analysis, path) if first <= each.at <= last]
        return [
            t.InlayHint(
                position=t.Position(*server.positions.position(source, each.at)),
                label=each.text,
                tooltip=each.why or None,
            )
            for each in shown
        ]

    @server.feature(t.TEXT_DOCUMENT_DEFINITION)
    def defined(params: t.DefinitionParams) -> list[t.Location]:
        return _places(server, params, definitions)

    @server.feature(t.TEXT_DOCUMENT_REFERENCES)
    def referred(params: t.ReferenceParams) -> list[t.Location]:
        return _places(server, params, references)

    @server.feature(t.TEXT_DOCUMENT_DOCUMENT_SYMBOL)
    def outlined(params: t.DocumentSymbolParams) -> list[t.DocumentSymbol]:
        found = server.analysis(params.text_document.uri)
        return [] if found is None else [server.symbol(each) for each in symbols(found[0], found[1])]

    legend = t.SemanticTokensLegend(token_types=list(KINDS), token_modifiers=["definition"])

    @server.feature(t.TEXT_DOCUMENT_SEMANTIC_TOKENS_FULL, legend)
    def painted(params: t.SemanticTokensParams) -> t.SemanticTokens:
        found = server.analysis(params.text_document.uri)
        if found is None:
            return t.SemanticTokens([])
        analysis, path, source = found
        data: list[int] = []
        line = character = 0
        for each in colored(analysis, path):
            start, end = (server.positions.position(source, offset) for offset in (each.start, each.end))
            ahead = start.character - (character if start.line == line else 0)
            data += [
                start.line - line,
                ahead,
                end.character - start.character,
                KINDS.index(each.kind),
                int(each.defines),
            ]
            line, character = start
        return t.SemanticTokens(data)


def _places(server: SpecServer, params: Any, find: Callable[[Analysis, str, int], list[Span]]) -> list[t.Location]:
    found = server.analysis(params.text_document.uri)
    if found is None:
        return []
    analysis, path, source = found
    return [server.location(s) for s in find(analysis, path, server.positions.offset(source, _at(params.position)))]


def _writing(server: SpecServer) -> None:
    """What is asked in order to change a text."""

    @server.feature(t.TEXT_DOCUMENT_COMPLETION, t.CompletionOptions(trigger_characters=[" ", "=", '"', "/", "(", "{"]))
    def completed(params: t.CompletionParams) -> t.CompletionList:
        found = server.analysis(params.text_document.uri)
        if found is None:
            return t.CompletionList(False, [])
        analysis, path, source = found
        offset = server.positions.offset(source, _at(params.position))
        items = [
            t.CompletionItem(
                label=each.label,
                kind=_COMPLETION_KINDS[each.kind],
                detail=each.detail or None,
                documentation=t.MarkupContent(t.MarkupKind.Markdown, each.doc) if each.doc else None,
                sort_text=f"{each.order}{each.label}",
                text_edit=t.TextEdit(server.range(source.span(each.start, each.end)), each.text),
            )
            for each in complete(analysis, path, offset)
        ]
        return t.CompletionList(False, items)

    @server.feature(t.TEXT_DOCUMENT_PREPARE_RENAME)
    def prepared(params: t.PrepareRenameParams) -> t.Range | None:
        found = server.analysis(params.text_document.uri)
        if found is None:
            return None
        analysis, path, source = found
        named = occurrence_at(analysis, path, server.positions.offset(source, _at(params.position)))
        return server.range(named.span) if named is not None and named.kind in RENAMED else None

    @server.feature(t.TEXT_DOCUMENT_RENAME, t.RenameOptions(prepare_provider=True))
    def renamed(params: t.RenameParams) -> t.WorkspaceEdit | None:
        found = server.analysis(params.text_document.uri)
        if found is None:
            return None
        analysis, path, source = found
        offset = server.positions.offset(source, _at(params.position))
        try:
            return server.edit(rename(analysis, path, offset, params.new_name))
        except RenameRefused as refused:
            server.window_show_message(t.ShowMessageParams(t.MessageType.Warning, str(refused)))
            return None

    kinds = [t.CodeActionKind.QuickFix, t.CodeActionKind.SourceFixAll]

    @server.feature(t.TEXT_DOCUMENT_CODE_ACTION, t.CodeActionOptions(code_action_kinds=kinds))
    def corrected(params: t.CodeActionParams) -> list[t.CodeAction]:
        found = server.analysis(params.text_document.uri)
        if found is None:
            return []
        analysis, path, source = found
        start, end = (server.positions.offset(source, _at(each)) for each in (params.range.start, params.range.end))
        only = params.context.only
        quick, every = (
            only is None or any(kind.value.startswith(each) for each in only)
            for kind in (t.CodeActionKind.QuickFix, t.CodeActionKind.SourceFixAll)
        )
        actions: list[t.CodeAction] = []
        if quick:
            there = corrections(analysis, path, start, end)
            actions += [server.action(each, t.CodeActionKind.QuickFix) for each in there]
        if every and (actions or only is not None):
            whole = all_corrections(analysis)
            actions += [server.action(whole, t.CodeActionKind.SourceFixAll)] if whole is not None else []
        return actions

    @server.feature(t.TEXT_DOCUMENT_FORMATTING)
    def formatted(params: t.DocumentFormattingParams) -> list[t.TextEdit]:
        found = server.analysis(params.text_document.uri)
        if found is None:
            return []
        source = found[2]
        try:
            text = format_source(source)
        except (SpecErrors, FormatFault):  # a text with syntax errors stays as it is; its diagnostics say why
            return []
        whole = server.range(source.span(0, len(source.text)))
        return [t.TextEdit(whole, text)] if text != source.text else []
