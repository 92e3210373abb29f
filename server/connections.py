"""Connections of clients: those on which no request comes do not stay, and do not keep others out."""

from asyncio import BaseTransport
from collections.abc import Callable
from resource import RLIMIT_NOFILE, getrlimit
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from xtrain.server.limits import ServerLimits


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
