"""Requests to a server, repeated until they are taken: every one of them is executed once, however often it is sent."""

import itertools
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import msgspec

BASE: Final = "/api/v1/"
AGAIN: Final = frozenset({408, 429, 500, 502, 503, 504})  # statuses of what was not taken, and may be later
REPLY: Final = 60.0  # seconds for an answer; the server holds a request for a result for less
R = TypeVar("R")
LONGEST_PAUSE: Final = 5.0  # seconds between two attempts


class ServerRefused(Exception):
    """The server has not taken a request, and would not take it if it came again. status: of HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{message} (status {status})")
        self.status = status


class ServerUnreachable(Exception):
    """No answer came in time. The same call again is the same request."""


class HttpClient:
    """patience: seconds for which a request is repeated while the server is away or busy."""

    def __init__(self, url: str, key: str | None, patience: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ValueError(f"{url!r} is no address of a server, such as http://127.0.0.1:8000")
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname, parts.port
        self._path = parts.path.rstrip("/") + BASE
        self._headers = {} if key is None else {"X-API-Key": key}
        self._patience = patience
        self._connections = threading.local()  # one for each thread that asks

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON of the answer; None where it is empty. Raises ServerRefused and ServerUnreachable."""
        content = None if body is None else msgspec.json.encode(body)
        raw = self._taken(method, path, content, HTTPResponse.read)
        return msgspec.json.decode(raw) if raw else None

    def download(self, path: str) -> Iterator[bytes]:
        """The pieces of a file. Raises ServerUnreachable where it ends too early."""
        response = self._taken("GET", path, None, lambda found: found)
        try:
            while piece := response.read(2**20):
                yield piece
            if response.length:
                raise HTTPException(f"{response.length} bytes are missing")
        except (OSError, HTTPException) as error:
            self._connections.open = None
            raise ServerUnreachable(f"{self._host}:{self._port}: {type(error).__name__}: {error}") from error

    def _taken(self, method: str, path: str, content: bytes | None, read: Callable[[HTTPResponse], R]) -> R:
        """Send it until it is taken, and read the answer, which may break off."""
        until = time.monotonic() + self._patience
        for attempt in itertools.count():
            pause = min(0.1 * 2**attempt, LONGEST_PAUSE)
            try:
                response = self._send(method, path, content)
                if response.status < 300:
                    return read(response)
                message = _message(response.read())
            except (OSError, HTTPException) as error:
                self._connections.open = None
                problem: Exception = ServerUnreachable(f"{self._host}:{self._port}: {type(error).__name__}: {error}")
            else:
                if response.status not in AGAIN:
                    raise ServerRefused(response.status, message)
                problem = ServerUnreachable(f"{message} (status {response.status})")
                after = response.headers.get("Retry-After", "")
                pause = float(after) if after.isdigit() else pause
            if time.monotonic() + pause > until:
                raise problem
            time.sleep(pause)
        raise AssertionError("the loop ends by itself")

    def _send(self, method: str, path: str, content: bytes | None) -> HTTPResponse:
        connection: HTTPConnection | None = getattr(self._connections, "open", None)
        if connection is None:
            connection = self._connections.open = self._new_connection()
        headers = self._headers if content is None else {**self._headers, "Content-Type": "application/json"}
        connection.request(method, self._path + path, content, headers)
        return connection.getresponse()

    def _new_connection(self) -> HTTPConnection:
        if self._secure:
            context = ssl.create_default_context()
            return HTTPSConnection(self._host, self._port, timeout=REPLY, context=context)
        return HTTPConnection(self._host, self._port, timeout=REPLY)


def _message(raw: bytes) -> str:
    try:
        return str(msgspec.json.decode(raw, type=dict[str, Any])["error"])
    except (msgspec.DecodeError, msgspec.ValidationError, KeyError):
        return "the answer is not that of an xtrain server"
