"""A real editor's side of `xtrain lsp`: a client in a thread of its own, which starts the server as an editor does."""

import asyncio
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from lsprotocol import types as t
from pygls.protocol import default_converter
from pytest_lsp import LanguageClient, client_capabilities
from pytest_lsp.client import DEFAULT_CLIENT_FEATURES, register_lsp_features

PATIENCE = 60  # seconds; of a busy machine
_PARAMS: dict[str, Any] = {
    "hover": t.HoverParams,
    "completion": t.CompletionParams,
    "definition": t.DefinitionParams,
    "references": t.ReferenceParams,
    "rename": t.RenameParams,
    "prepare_rename": t.PrepareRenameParams,
    "code_action": t.CodeActionParams,
    "formatting": t.DocumentFormattingParams,
    "inlay_hint": t.InlayHintParams,
    "semantic_tokens_full": t.SemanticTokensParams,
    "document_symbol": t.DocumentSymbolParams,
}


class Editor:
    """Opens and changes files, and asks about them. Every call waits for its answer.

    arrived: URI → the version, the diagnostics and the clock's seconds of the last message about it.
    """

    def __init__(self, folder: Path, client: str = "visual-studio-code") -> None:
        self.folder, self.versions = folder, dict[str, int]()
        self.arrived: dict[str, tuple[int | None, list[t.Diagnostic], float]] = {}
        self.news = threading.Condition()
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.client = LanguageClient(converter_factory=default_converter)

        def published(client: LanguageClient, params: t.PublishDiagnosticsParams) -> None:
            with self.news:
                self.arrived[params.uri] = params.version, list(params.diagnostics), time.perf_counter()
                self.news.notify_all()

        own = {t.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS: published}
        register_lsp_features(self.client, {**DEFAULT_CLIENT_FEATURES, **own})
        self.initialized = self._wait(lambda: self._start(client_capabilities(client)))

    async def _start(self, capabilities: t.ClientCapabilities) -> t.InitializeResult:
        await self.client.start_io(sys.executable, "-m", "xtrain", "lsp", cwd=str(self.folder))
        folders = [t.WorkspaceFolder(self.folder.as_uri(), self.folder.name)]
        params = t.InitializeParams(capabilities, root_uri=self.folder.as_uri(), workspace_folders=folders)
        return await self.client.initialize_session(params)

    def _wait(self, work: Callable[[], Awaitable[Any]]) -> Any:
        async def run() -> Any:
            return await work()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(PATIENCE)

    def _tell(self, method: str, params: Any) -> None:
        async def tell() -> None:
            getattr(self.client, f"text_document_did_{method}")(params)

        self._wait(tell)

    def open(self, path: Path, text: str) -> str:
        """Open a file with this text; its URI."""
        uri = path.as_uri()
        self.versions[uri] = self.versions.get(uri, 0) + 1
        self._tell("open", t.DidOpenTextDocumentParams(t.TextDocumentItem(uri, "xtrain", self.versions[uri], text)))
        return uri

    def change(self, uri: str, text: str, at: t.Range | None = None) -> None:
        """Put a text in the place of all that a file holds, or of a range of it."""
        self.versions[uri] += 1
        document = t.VersionedTextDocumentIdentifier(self.versions[uri], uri)
        whole = t.TextDocumentContentChangeWholeDocument(text)
        change = whole if at is None else t.TextDocumentContentChangePartial(at, text)
        self._tell("change", t.DidChangeTextDocumentParams(document, [change]))

    def close(self, uri: str) -> None:
        self._tell("close", t.DidCloseTextDocumentParams(t.TextDocumentIdentifier(uri)))

    def ask(self, what: str, uri: str, position: tuple[int, int] | None = None, **rest: Any) -> Any:
        """The answer to a request about a file."""
        if position is not None:
            rest["position"] = t.Position(*position)
        params = _PARAMS[what](text_document=t.TextDocumentIdentifier(uri), **rest)
        return self._wait(lambda: getattr(self.client, f"text_document_{what}_async")(params))

    def diagnostics(self, uri: str) -> list[t.Diagnostic]:
        """Those of the text that a file has now: waits until the server has sent them."""
        with self.news:
            there = self.news.wait_for(
                lambda: uri in self.arrived and self.arrived[uri][0] == self.versions[uri], PATIENCE
            )
            assert there, f"no diagnostics of {uri}"
            return self.arrived[uri][1]

    def stop(self) -> None:
        """End the session as an editor does."""
        self._wait(self.client.shutdown_session)
        self._wait(self.client.stop)
        self.loop.call_soon_threadsafe(self.loop.stop)
