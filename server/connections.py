"""Admission of clients: idle connections are closed; requests need a name of this server and a key."""

import re
from asyncio import BaseTransport
from collections.abc import Callable, Collection
from resource import RLIMIT_NOFILE, getrlimit
from typing import Any, Final

import h11
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from xtrain.server.access import REFUSAL, Keys, ServerLimits


def connections(limits: ServerLimits) -> Callable[..., "BoundedConnection"]:
    """Return a factory of connections for uvicorn. Half of the file descriptors are reserved for other uses."""
    most = min(limits.connections, getrlimit(RLIMIT_NOFILE)[0] // 2)
    return lambda **settings: BoundedConnection(most, limits.silence, **settings)


class BoundedConnection(H11Protocol):
    """A connection that is closed after `silence` seconds (or up to twice as many) without a request. Above `most`
    connections, the oldest one that never had a request is closed, or else the oldest without one now."""

    def __init__(self, most: int, silence: float, **settings: Any) -> None:
        super().__init__(**settings)
        self._most, self._silence = most, silence
        self._seen: object = None  # the last request, if it was done at the last check

    @property
    def silent(self) -> bool:
        """Return True if no request is being read or answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(transport)  # pyright: ignore[reportArgumentType]
        self._began = self.loop.time()
        self.loop.call_later(self._silence, self._look)
        if len(self.connections) > self._most:
            others = [one for one in self.connections if isinstance(one, BoundedConnection) and one.silent]
            min(others, key=lambda one: (one.cycle is not None, one._began)).transport.abort()

    def _look(self) -> None:
        if self.transport.is_closing():
            return
        if self.silent and self._seen is self.cycle:
            self.transport.abort()
            return
        self._seen = self.cycle if self.silent else self
        self.loop.call_later(self._silence, self._look)

    def shutdown(self) -> None:
        """Shut down: answers in progress are finished, and clients resend unfinished requests later. Silent clients
        also get no TLS close."""
        super().shutdown()
        if self.conn.their_state is h11.SEND_BODY or (self.silent and not self.transport.get_write_buffer_size()):
            self.transport.abort()


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
