"""Expectations in few lines that still show a change where it is: JSON and the diagnostics of a spec."""

import re
from json import dumps
from typing import Any

WIDTH = 120


def json_lines(value: Any, depth: int = 99, indent: str = "", before: str = "", after: str = "") -> list[str]:
    """Return the lines of a value: what fits on a line shares it; at `depth` a value and what is in it is one line."""
    flat = dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or depth <= isinstance(value, dict) or len(indent + before + flat) < WIDTH:
        return [f"{indent}{before}{flat}{after}"]
    opened, closed = "{}" if isinstance(value, dict) else "[]"
    entries = [("", item) for item in value]
    if isinstance(value, dict):
        entries = [(f"{dumps(key, ensure_ascii=False)}: ", item) for key, item in value.items()]
    lines = [f"{indent}{before}{opened}"]
    room = False
    for number, (name, item) in enumerate(entries, 1):
        inner = json_lines(item, depth - 1, f"{indent} ", name, "," * (number < len(entries)))
        if room and len(inner) == 1 and len(lines[-1]) + len(inner[0].strip()) < WIDTH:
            lines[-1] += f" {inner[0].strip()}"
        else:
            lines += inner
        room = len(inner) == 1
    lines[-1] += f"{closed}{after}"
    return lines


def json_text(value: Any, depth: int = 99) -> str:
    return "\n".join(json_lines(value, depth)) + "\n"


def diagnostics_text(rendered: str, name: str, source: str) -> str:
    """Return rendered diagnostics without the excerpts of `source`, the spec `name`: `^^^ hint` follows the message.

    An excerpt that shows another line, or carets elsewhere than under the column of the message, stays as it is.
    """
    lines = source.splitlines()

    def without_excerpt(found: re.Match[str]) -> str:
        message, line, column, shown, before, carets = found.groups()
        is_as_said = (lines[int(line) - 1].rstrip(), int(column) - 1) == (shown, len(before))
        return f"{message} {carets}" if is_as_said else found[0]

    place = rf"{re.escape(name)}:(\d+):(\d+)"
    for message in (rf"{place}: .*", rf"note: .*\({place}\)"):
        excerpt = rf"^({message})\n +\2 \| (.*)\n      \| ( *)(\^.*)$"
        rendered = re.sub(excerpt, without_excerpt, rendered, flags=re.MULTILINE)
    return rendered
