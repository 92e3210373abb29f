"""Requests that are let through: to a name of this server, from no web page, with a key.

A page in a browser reaches a server on the same machine, or behind the same firewall, as well as any program. It cannot
hide that it is a page: its requests have an Origin or a Sec-Fetch-Site, and where its own name was made to resolve to
the server (DNS rebinding) that name is their Host.
"""

import re
from collections.abc import Collection
from typing import Final

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from xtrain.server.keys import REFUSAL, Keys

BASE: Final = "/api/v1"
OPEN: Final = f"{BASE}/healthz"  # the one path that needs no key
LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
_HOST: Final = re.compile(r"(?:\[([0-9a-f:.]+)\]|([\w.-]+))(?::\d*)?", re.ASCII)
_NO_PAGE: Final = ("", "none", "same-origin")  # the server has no pages, so no page has its origin


def guard(app: Starlette, keys: Keys, hosts: Collection[str], origins: Collection[str]) -> None:
    """Add the checks to an application. Nothing else is read of a request that fails them.

    hosts: names of the server in addition to loopback names and the address that the client connected to. origins:
    origins of web pages that may call it, such as `https://lab.example`.
    """
    app.add_middleware(_WithKey, keys=keys)  # the last middleware added runs first
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST", "PUT", "DELETE"],
            allow_headers=["X-API-Key", "Authorization", "Content-Type", "Content-Encoding"],
        )
    app.add_middleware(_Addressed, hosts={*LOOPBACK, *(name.lower() for name in hosts)}, origins=set(origins))


class _Addressed:
    """Admits only requests to a name of the server, and none of unlisted web pages."""

    def __init__(self, app: ASGIApp, hosts: set[str], origins: set[str]) -> None:
        self._app, self._hosts, self._origins = app, hosts, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(scope)) is not None:
            status, message = refusal
            return await JSONResponse({"error": message}, status)(scope, receive, send)
        return await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        parts = _HOST.fullmatch(b", ".join(_values(scope, b"host")).decode("latin-1").lower())
        host = (parts[1] or parts[2]) if parts else None
        if host not in self._hosts and (host is None or host != (scope.get("server") or ("",))[0]):
            named = f"`{host[:100]}` is" if host else "its Host header has"
            return 421, f"{named} no name of this server: connect by its address, or add the name to `serve.hosts`"
        origins = {value.decode("latin-1") for value in _values(scope, b"origin")}
        pages = {value.decode("latin-1").strip().lower() for value in _values(scope, b"sec-fetch-site")}
        if origins - self._origins or (not origins and pages - set(_NO_PAGE)):
            return 403, "web pages cannot use this server, unless their origin is listed in `serve.origins`"
        return None


class _WithKey:
    """Admits only requests with a key; `owner` is the key's owner."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != OPEN:
            given = b"".join(_values(scope, b"x-api-key"))
            bearer = b"".join(_values(scope, b"authorization"))
            if not given and bearer[:7].lower() == b"bearer ":
                given = bearer[7:]
            owner = self._keys.owner(given)
            if owner is None:
                return await JSONResponse({"error": REFUSAL}, 401)(scope, receive, send)
            scope.setdefault("state", {})["owner"] = owner
        return await self._app(scope, receive, send)


def _values(scope: Scope, name: bytes) -> list[bytes]:
    """Return the values of all headers of a name."""
    return [value for header, value in scope["headers"] if header == name]
