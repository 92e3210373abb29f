"""Reads a Chrome trace as torch writes it, entry by entry: such files are large, and little of each is needed."""

import json
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen


class TornTrace(Exception):
    """The file holds no whole trace."""


@frozen
class TraceEntry:
    """Something that took time. begin, end: in seconds of the trace's own clock. line: its thread or stream."""

    category: str
    name: str
    begin: float
    end: float
    line: tuple[str, str]


WANTED = frozenset({"cpu_op", "kernel", "gpu_memcpy", "gpu_memset", "user_annotation"})
_HEAD = '"traceEvents"'


def entries_of(path: Path) -> Iterator[TraceEntry]:
    """Every entry that a summary is made of. Raises TornTrace where the file ends before the trace does, OSError."""
    text = path.read_text(encoding="utf-8", errors="replace")
    at = text.find("[", text.find(_HEAD))
    if _HEAD not in text or at < 0 or not text.rstrip().endswith("}"):
        raise TornTrace(f"{path} holds no whole trace")
    decode = json.JSONDecoder(strict=False).raw_decode
    try:
        at = _next(text, at + 1)
        while text[at] != "]":
            content, at = decode(text, at)
            if content.get("ph") == "X" and content.get("cat") in WANTED:
                begin = content["ts"] / 1e6
                line = (str(content.get("pid")), str(content.get("tid")))
                yield TraceEntry(content["cat"], content["name"], begin, begin + content.get("dur", 0) / 1e6, line)
            at = _next(text, at)
            at = _next(text, at + 1) if text[at] == "," else at
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise TornTrace(f"{path} cannot be read as a trace: {error}") from error


def _next(text: str, at: int) -> int:
    """The next place that is no blank."""
    while text[at].isspace():
        at += 1
    return at
