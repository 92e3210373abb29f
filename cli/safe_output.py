"""Output of a command that is safe for terminals: a terminal shows every character and obeys none.

Names, values and messages come from other people's specs, plans, runs and models. Control characters, including
bidirectional ones, are written as JSON escapes, so that JSON keeps its meaning.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, Final, TextIO, cast

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
    """A text stream whose `write` escapes unsafe characters; other attributes are those of `stream`."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write a text; return its length."""
        self.stream.write(harmless(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def safe_output() -> Iterator[None]:
    """Make standard output and standard error safe during a command."""
    with (
        redirect_stdout(cast(TextIO, SafeOutput(sys.stdout))),
        redirect_stderr(cast(TextIO, SafeOutput(sys.stderr))),
    ):
        yield


def drawn_on(stream: TextIO, ui: str = "console") -> TextIO:
    """Return the unfiltered stream, for a view that moves the cursor and escapes its own texts; for other views,
    `stream` itself."""
    return stream.stream if isinstance(stream, SafeOutput) and ui == "console" else stream
