"""Blocks of JSON lines as records.

msgspec reads them four times as fast as the standard library does (benchmarks/dashboard.py --parsers): of a run with a
million logged steps that is the difference between two seconds and six.
"""

import json
from typing import Any

import msgspec

Record = dict[str, Any]

_OBJECTS = msgspec.json.Decoder(dict[str, Any])


def records(block: bytes) -> tuple[list[Record], int]:
    """The objects in whole lines, in their order, and how many lines hold none: torn, or no object at all."""
    try:
        return _OBJECTS.decode_lines(block), 0
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass  # line by line, to lose no more than what is damaged
    found: list[Record] = []
    damaged = 0
    for line in block.split(b"\n"):
        if line.strip():
            record = _record(line)
            if record is None:
                damaged += 1
            else:
                found.append(record)
    return found, damaged


def _record(line: bytes) -> Record | None:
    try:
        return _OBJECTS.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:  # takes NaN and Infinity, which other writers than ours may use
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
