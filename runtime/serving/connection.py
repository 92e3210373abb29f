"""The socket between the process that listens to clients and the first rank: messages with their length before them."""

import socket
from typing import Final

from attrs import frozen

from xtrain.runtime.serving.messages import RankMessage

HEAD: Final = 8  # bytes of a length


class Closed(Exception):
    """The other end is gone."""


@frozen(eq=False)
class Connection:
    socket: socket.socket

    def send(self, message: RankMessage) -> None:
        """Raises Closed."""
        content = message.pack()
        try:
            self.socket.sendall(len(content).to_bytes(HEAD, "little") + content)
        except OSError as error:
            raise Closed from error

    def receive(self, seconds: float) -> RankMessage | None:
        """The next message, whole; None if none begins within some seconds. Raises Closed."""
        self.socket.settimeout(seconds)
        try:
            first = self.socket.recv(1)
        except TimeoutError:
            return None
        except OSError as error:
            raise Closed from error
        if not first:
            raise Closed
        self.socket.settimeout(None)
        head = first + self._exactly(HEAD - 1)
        return RankMessage.unpack(self._exactly(int.from_bytes(head, "little")))

    def _exactly(self, count: int) -> bytes:
        content = bytearray(count)
        view, at = memoryview(content), 0
        while at < count:
            try:
                got = self.socket.recv_into(view[at:])
            except OSError as error:
                raise Closed from error
            if not got:
                raise Closed
            at += got
        return bytes(content)

    def close(self) -> None:
        self.socket.close()
