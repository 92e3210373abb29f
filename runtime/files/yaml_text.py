"""JSON values as YAML, a line for each, for people and for programs of both versions of YAML."""

import json
import re
from typing import Any

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
# What YAML 1.1 takes for something else than a text.
_WORDS = frozenset(("true", "false", "yes", "no", "on", "off", "y", "n", "null", "nan", "inf"))
_UNPRINTABLE = re.compile("[^\t\n -~\u00a0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")


def to_yaml(value: dict[str, Any]) -> str:
    """Objects and lists as blocks, everything else as JSON has it."""
    return "".join(f"{line}\n" for line in _lines(value)) if value else "{}\n"


def _lines(value: Any) -> list[str]:
    if isinstance(value, dict) and value:
        return [line for key, item in value.items() for line in _entry(f"{_key(key)}:", item, "  ")]
    if isinstance(value, list | tuple) and value:
        return [line for item in value for line in _item(item)]
    return [_scalar(value)]


def _entry(head: str, item: Any, indent: str) -> list[str]:
    lines = _lines(item)
    if isinstance(item, dict | list | tuple) and item:
        return [head, *(f"{indent}{line}" for line in lines)]
    return [f"{head} {lines[0]}"]


def _item(item: Any) -> list[str]:
    first, *rest = _lines(item)
    return [f"- {first}", *(f"  {line}" for line in rest)]


def _key(key: str) -> str:
    return key if _PLAIN_KEY.fullmatch(key) and key.lower() not in _WORDS else _scalar(key)


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))
    text = json.dumps(value)
    # Without a point YAML 1.1 reads 1e-08 as a text.
    return re.sub(r"^(-?\d+)e", r"\1.0e", text) if isinstance(value, float) else text
