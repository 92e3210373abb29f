"""Requests to a server, repeated until they are taken, and their results.

Every request is executed once, however often it is sent.
"""

import itertools
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any, Final, Generic, TypeVar
from urllib.parse import urlsplit

import msgspec

BASE: Final = "/api/v1/"
AGAIN: Final = frozenset({408, 425, 429})  # statuses that allow a retry, like those from 500 on
EMPTY: Final = 204
REPLY: Final = 60.0  # seconds for an answer; the server holds a request for a result for less
R = TypeVar("R")
LONGEST_PAUSE: Final = 5.0  # seconds between two attempts


class ServerRefused(Exception):
    """A request that the server refused, and would refuse again. status: of HTTP. repeated: an earlier attempt without
    an answer may have been accepted."""

    def __init__(self, status: int, message: str, *, repeated: bool = False) -> None:
        super().__init__(f"{message} (status {status})")
        self.status, self.message, self.repeated = status, message, repeated


class ServerUnreachable(Exception):
    """No complete answer in time. It is unknown whether the request was accepted."""


class HttpClient:
    """A client of the server's HTTP API, or of another one below `base`. patience: seconds for which a request is
    retried while the server is away or busy. reply: seconds to wait for an answer."""

    def __init__(self, url: str, key: str | None, patience: float, *, base: str = BASE, reply: float = REPLY) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ValueError(f"{url!r} is not the address of a server, such as http://127.0.0.1:8000")
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname, parts.port
        self._path = parts.path.rstrip("/") + base
        self._headers = {} if key is None else {"X-API-Key": key, "Authorization": f"Bearer {key}"}
        self.patience, self._reply = patience, reply
        self._connections = threading.local()  # one per thread

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Send a request and return the JSON of the answer; None if it is empty. Raises ServerRefused and
        ServerUnreachable."""
        return self.send(method, path, None if body is None else msgspec.json.encode(body))

    def send(self, method: str, path: str, content: bytes | Path | None) -> Any:
        """Send a request like `ask`, with a body that is already JSON, or a file."""
        return self._taken(method, path, content, _answer)

    def raw(self, method: str, path: str, content: bytes | None) -> bytes:
        """Send a request like `ask`, and return the answer as it is."""
        return self._taken(method, path, content, lambda found: found.read())

    def download(self, path: str) -> Iterator[bytes]:
        """Yield the pieces of a file. Raises ServerUnreachable if it is truncated."""
        response = self._taken("GET", path, None, lambda found: found)
        try:
            while piece := response.read(2**20):
                yield piece
            if response.length:
                raise HTTPException(f"{response.length} bytes are missing")
        except (OSError, HTTPException) as error:
            self._hang_up()
            raise ServerUnreachable(f"{self._host}:{self._port}: {type(error).__name__}: {error}") from error

    def _taken(self, method: str, path: str, content: bytes | Path | None, read: Callable[[HTTPResponse], R]) -> R:
        """Send a request until it is accepted, and read the answer, which may be truncated."""
        until = time.monotonic() + self.patience
        for attempt in itertools.count():
            pause = min(0.1 * 2**attempt, LONGEST_PAUSE)
            try:
                response = self._send(method, path, content)
                if response.status < 300:
                    return read(response)
                message = _message(response.read())
            except (OSError, HTTPException) as error:
                self._hang_up()
                problem: Exception = ServerUnreachable(f"{self._host}:{self._port}: {type(error).__name__}: {error}")
            else:
                if response.status not in AGAIN and response.status < 500:
                    raise ServerRefused(response.status, message, repeated=attempt > 0)
                problem = ServerUnreachable(f"{message} (status {response.status})")
                after = response.headers.get("Retry-After", "")
                pause = float(after) if after.isdigit() else pause
            if time.monotonic() + pause > until:
                raise problem
            time.sleep(pause)
        raise AssertionError("the loop ends by itself")

    def _send(self, method: str, path: str, content: bytes | Path | None) -> HTTPResponse:
        connection: HTTPConnection | None = getattr(self._connections, "open", None)
        if connection is None:
            connection = self._connections.open = self._new_connection()
        if isinstance(content, Path):
            headers = {
                **self._headers,
                "Content-Type": "application/x-tar",
                "Content-Length": str(content.stat().st_size),
            }
            with content.open("rb") as file:
                connection.request(method, self._path + path, file, headers)
            return connection.getresponse()
        headers = self._headers if content is None else {**self._headers, "Content-Type": "application/json"}
        connection.request(method, self._path + path, content, headers)
        return connection.getresponse()

    def _hang_up(self) -> None:
        """Close the connection; the next request opens a new one."""
        if (connection := getattr(self._connections, "open", None)) is not None:
            connection.close()
        self._connections.open = None

    def _new_connection(self) -> HTTPConnection:
        if self._secure:
            context = ssl.create_default_context()
            return HTTPSConnection(self._host, self._port, timeout=self._reply, context=context)
        return HTTPConnection(self._host, self._port, timeout=self._reply)


def _answer(response: HTTPResponse) -> Any:
    """Return the JSON of an answer. A truncated answer of unknown length is invalid JSON."""
    raw = response.read()
    if not raw and response.status == EMPTY:
        return None
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise HTTPException("the answer is incomplete, or not from an xtrain server") from None


def _message(raw: bytes) -> str:
    """Return what an answer says is wrong; other programs give `error` with its `message`, or `detail`."""
    try:
        found = msgspec.json.decode(raw, type=dict[str, Any])
        said = found.get("error") or found.get("message") or found["detail"]
        return str(said["message"] if isinstance(said, dict) else said)
    except (msgspec.DecodeError, msgspec.ValidationError, KeyError):
        return "the answer is not from an xtrain server"


T = TypeVar("T")


class RequestFailed(Exception):
    """A failed request. category: `user`, an error of this program, or `server`."""

    def __init__(self, message: str, category: str) -> None:
        super().__init__(message)
        self.category = category


class Pending(Generic[T]):
    """The requests of a call, perhaps several, and their result. The server keeps results for an hour."""

    def __init__(self, http: HttpClient, ids: Sequence[str], read: Callable[[list[dict[str, Any]]], T]) -> None:
        self._http, self._ids, self._read = http, ids, read
        self._found: list[dict[str, Any]] = []

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result. Raises RequestFailed, TimeoutError after `timeout` seconds, and the errors of
        requests."""
        until = None if timeout is None else time.monotonic() + timeout
        while len(self._found) < len(self._ids):
            answer = self._http.ask("POST", "retrieve_future", {"request_id": self._ids[len(self._found)]})
            if answer.get("type") != "try_again":
                self._found.append(answer)
            elif until is not None and time.monotonic() > until:
                raise TimeoutError(f"no result after {timeout:.0f} s; it can be requested again")
        for answer in self._found:
            if "error" in answer:
                raise RequestFailed(answer["error"], answer.get("category", "unknown"))
        return self._read(self._found)
