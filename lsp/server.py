"""`xtrain lsp`: the language server. Turns requests of an editor into calls of this folder, and their answers back.

Everything is answered from the analysis of the current text; what a request asks of the plan is computed in a thread,
when nothing has been typed for a while, so that diagnostics never wait for it.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from lsprotocol import types as t
from pygls.uris import to_fs_path

from xtrain.dsl.diagnostics.diagnostic import Span, SpecErrors
from xtrain.dsl.syntax.format import FormatFault, format_source
from xtrain.lsp.analysis import Analysis, all_corrections, corrections, symbols
from xtrain.lsp.completion import complete
from xtrain.lsp.hover import hints, hover
from xtrain.lsp.names import KINDS, RENAMED, RenameRefused, colored, definitions, occurrence_at, references, rename
from xtrain.lsp.spec_server import QUIET, Positions, SpecServer

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


def make_server() -> SpecServer:
    """Return the language server with all its requests."""
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
        server.pages.cleanup()


def _texts(server: SpecServer) -> None:
    @server.feature(t.TEXT_DOCUMENT_DID_OPEN)
    def opened(params: t.DidOpenTextDocumentParams) -> None:
        document = params.text_document
        server.opened(document.uri, document.version, document.text)

    @server.feature(t.TEXT_DOCUMENT_DID_CHANGE)
    def changed(params: t.DidChangeTextDocumentParams) -> None:
        server.changed(params.text_document.uri, params.text_document.version, params.content_changes)

    @server.feature(t.TEXT_DOCUMENT_DID_CLOSE)
    def closed(params: t.DidCloseTextDocumentParams) -> None:
        server.closed(params.text_document.uri)

    @server.feature(t.WORKSPACE_DID_CHANGE_WATCHED_FILES)
    def watched(params: t.DidChangeWatchedFilesParams) -> None:
        for change in params.changes:
            server.specs.changed_on_disk(os.path.normpath(to_fs_path(change.uri) or change.uri))
        server.check_soon()


def _reading(server: SpecServer) -> None:
    """Register the requests that read a text."""

    @server.feature(t.TEXT_DOCUMENT_HOVER)
    async def hovered(params: t.HoverParams) -> t.Hover | None:
        found = server.analysis(params.text_document.uri)
        if found is None:
            return None
        analysis, path, source = found
        plan = await server.plan(analysis)
        text = hover(analysis, path, server.positions.offset(source, params.position), plan)
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
        first, last = (server.positions.offset(source, each) for each in (params.range.start, params.range.end))
        shown = [each for each in hints(analysis, path) if first <= each.at <= last]
        return [
            t.InlayHint(server.positions.position(source, each.at), each.text, tooltip=each.why or None)
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
            width, kind = end.character - start.character, KINDS.index(each.kind)
            data += [start.line - line, ahead, width, kind, int(each.defines)]
            line, character = start.line, start.character
        return t.SemanticTokens(data)


def _places(server: SpecServer, params: Any, find: Callable[[Analysis, str, int], list[Span]]) -> list[t.Location]:
    found = server.analysis(params.text_document.uri)
    if found is None:
        return []
    analysis, path, source = found
    return [server.location(s) for s in find(analysis, path, server.positions.offset(source, params.position))]


def _writing(server: SpecServer) -> None:
    """Register the requests that change a text."""

    @server.feature(t.TEXT_DOCUMENT_COMPLETION, t.CompletionOptions(trigger_characters=[" ", "=", '"', "/", "(", "{"]))
    def completed(params: t.CompletionParams) -> t.CompletionList:
        found = server.analysis(params.text_document.uri)
        if found is None:
            return t.CompletionList(False, [])
        analysis, path, source = found
        offset = server.positions.offset(source, params.position)
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
        named = occurrence_at(analysis, path, server.positions.offset(source, params.position))
        return server.range(named.span) if named is not None and named.kind in RENAMED else None

    @server.feature(t.TEXT_DOCUMENT_RENAME, t.RenameOptions(prepare_provider=True))
    def renamed(params: t.RenameParams) -> t.WorkspaceEdit | None:
        found = server.analysis(params.text_document.uri)
        if found is None:
            return None
        analysis, path, source = found
        offset = server.positions.offset(source, params.position)
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
        start, end = (server.positions.offset(source, each) for each in (params.range.start, params.range.end))
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
        except (SpecErrors, FormatFault):  # a text with syntax errors is not formatted; its diagnostics are shown
            return []
        whole = server.range(source.span(0, len(source.text)))
        return [t.TextEdit(whole, text)] if text != source.text else []
