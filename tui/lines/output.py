"""A text stream that outlives its reader."""

import contextlib
import os
from typing import TextIO


class Output:
    """Output stream that discards text after a write error: a closed pipe must not end the watching process.

    Every write is flushed, so that a pipe gets a line as soon as a terminal would.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.closed = False

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        with contextlib.suppress(AttributeError, ValueError):
            return not self.closed and self._stream.isatty()
        return False

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        if not self.closed:
            try:
                try:
                    self._stream.write(text)
                except UnicodeEncodeError:
                    self._stream.write(text.encode(self.encoding, "replace").decode(self.encoding))
                self._stream.flush()
            except (OSError, ValueError):  # a broken pipe, a terminal hung up, a full disk, a closed file
                self._abandon()
        return len(text)

    def flush(self) -> None:
        """Do nothing: each write is flushed."""

    def _abandon(self) -> None:
        self.closed = True
        # Text still buffered would fail again when the interpreter flushes it at exit, with a message and an exit code
        # of its own; so the descriptor is redirected to nothing.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            descriptor = self._stream.fileno()
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
