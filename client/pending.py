"""What a request will give: it was taken by the server, and its result is fetched when it is asked for."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from xtrain.client.http import HttpClient

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
                raise TimeoutError(f"no result after {timeout:.0f} s; it can be asked for again")
        for answer in self._found:
            if "error" in answer:
                raise RequestFailed(answer["error"], answer.get("category", "unknown"))
        return self._read(self._found)
