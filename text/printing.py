"""Output streams of commands: a terminal shows every character and interprets none, and a reader may leave early.

Names, values and messages come from specs, plans, runs and models of others. Characters that a terminal would
interpret, including direction marks, are written as JSON escapes, so that JSON remains the same.
"""

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from contextvars import ContextVar
from typing import Any, Final, TextIO, cast

# True where pages cut no line: in reports, and while a command writes to a file or a pipe.
WHOLE: Final[ContextVar[bool]] = ContextVar("whole", default=False)
# Colors printed by commands, which can hide or move nothing; and all control characters.
_OBEYED: Final = re.compile(
    r"(\x1b\[(?:0|[12](?:;3[1-7])?|3[1-7])?m)"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)


def harmless(text: str) -> str:
    """Return a text without terminal control characters, except line ends, tabs and plain colors."""
    if text.isascii() and text.replace("\n", "").isprintable():
        return text
    return _OBEYED.sub(lambda found: found[1] or f"\\u{ord(found[0]):04x}", text)


class SafeOutput:
    """A text stream whose `write` escapes unsafe characters; other attributes come from `stream`."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write a text; return its length."""
        self.stream.write(harmless(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def whole_pages(whole: bool = True) -> Iterator[None]:
    """Cut no line of a page if `whole`."""
    before = WHOLE.set(whole)
    try:
        yield
    finally:
        WHOLE.reset(before)


@contextmanager
def safe_output() -> Iterator[None]:
    """Make standard output and standard error safe during a command, and cut no line of a page without a terminal."""
    with (
        whole_pages(not sys.stdout.isatty()),
        redirect_stdout(cast(TextIO, SafeOutput(sys.stdout))),
        redirect_stderr(cast(TextIO, SafeOutput(sys.stderr))),
    ):
        yield


def drawn_on(stream: TextIO, ui: str = "console") -> TextIO:
    """Return the unfiltered stream, for a view that moves the cursor and escapes its own texts; for other views,
    `stream` itself."""
    return stream.stream if isinstance(stream, SafeOutput) and ui == "console" else stream


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
