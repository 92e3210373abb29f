"""The dashboard in a browser: Textual's own server, which starts one dashboard for each connection."""

import os
import shlex
import sys
from collections.abc import Sequence
from hmac import compare_digest
from pathlib import Path
from typing import Any

from aiohttp import web
from textual_serve.server import Server

from xtrain.tui.board.app import BoardApp
from xtrain.tui.board.opening import NICENESS, THEME_FILE
from xtrain.tui.board.reading import state_folder

# The page and its connection come from this server, and nothing else is loaded.
_POLICY = "default-src 'self' 'unsafe-inline' data:; connect-src 'self' ws: wss:; frame-ancestors 'none'"


class BoardServer(Server):
    """Server of the dashboard of a run, for those who know the token.

    The token is taken once from the address and kept as a cookie, which no other site can use. `/ws`, through which a
    reader can stop a run, also refuses pages of other origins.
    """

    def __init__(self, command: str, host: str, port: int, token: str, title: str) -> None:
        super().__init__(command, host=host, port=port, title=title)
        self._token, self._cookie = token, f"xtrain-{port}"

    @property
    def address(self) -> str:
        """Address that opens the dashboard."""
        return f"{self.public_url}/?token={self._token}"

    async def _make_app(self) -> web.Application:
        app = await super()._make_app()
        app.middlewares.append(self._only_with_token)
        app.on_response_prepare.append(_add_headers)
        return app

    async def on_startup(self, app: web.Application) -> None:
        """Print nothing: nobody is answered yet."""

    def serve(self, debug: bool = False) -> None:
        """Serve until the process is interrupted; print the address as soon as it answers."""

        def announce(*_: Any) -> None:
            print(f"dashboard  {self.address}", flush=True)

        web.run_app(self._make_app(), host=self.host, port=self.port, print=announce, access_log=None)

    def _is_token(self, given: str) -> bool:
        return compare_digest(given.encode("utf-8", "surrogateescape"), self._token.encode())

    @web.middleware
    async def _only_with_token(self, request: web.Request, handler: Any) -> web.StreamResponse:
        # A proxy that ends TLS says so in a header that no page of another site can set.
        scheme = "https" if request.headers.get("X-Forwarded-Proto") == "https" else request.scheme
        if request.path == "/" and self._is_token(request.query.get("token", "")):
            found = web.HTTPFound("/")
            found.set_cookie(self._cookie, self._token, httponly=True, samesite="Strict", secure=scheme == "https")
            raise found
        if not self._is_token(request.cookies.get(self._cookie, "")):
            raise web.HTTPForbidden(text="open the address that `xtrain watch --web` has printed, with its token\n")
        here = f"{scheme}://{request.host}"
        if request.path == "/ws" and request.headers.get("Origin", here) != here:
            raise web.HTTPForbidden(text="pages of other sites cannot open the dashboard\n")
        self.public_url = here  # also through a forwarded port
        return await handler(request)


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Content-Security-Policy"] = _POLICY
    response.headers["Referrer-Policy"] = "no-referrer"


def serve_board(
    directory: Path, *, host: str, port: int, token: str, compared: Sequence[Path] = (), first: str = ""
) -> None:
    """Serve the dashboard until the process is interrupted. Raises OSError if the address cannot be used."""
    words = [sys.executable, "-P", "-m", __name__, first, *(str(path.absolute()) for path in (directory, *compared))]
    BoardServer(shlex.join(words), host, port, token, title=f"xtrain {directory.name}").serve()


if __name__ == "__main__":  # as the server starts it, with Textual's driver for browsers
    os.nice(NICENESS)
    first, shown, *others = sys.argv[1:]
    compared = [Path(path) for path in others]
    sys.exit(BoardApp(Path(shown), compared=compared, first=first, theme_file=state_folder() / THEME_FILE).run() or 0)
