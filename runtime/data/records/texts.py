"""What counts as text, and how values that are none are named."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from xtrain.runtime.data.records.records import Unusable


def checked(text: object, what: str) -> str | Unusable:
    """`text`, if it is one with something in it; `what` names it in the reason why it is not."""
    if not isinstance(text, str):
        return Unusable(f"{what} is {described(text)}, not a string")
    if not text:
        return Unusable(f"{what} is empty")
    fault = not_text(text)
    return text if fault is None else Unusable(f"{what} {fault}")


def not_text(text: str) -> str | None:
    """What keeps a string from being text: half of a surrogate pair has no UTF-8 form, though JSON can spell it."""
    if text.isascii():  # known without looking at the characters
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"has an unpaired surrogate at character {error.start}"
    return None


def decoded(data: bytes) -> str | Unusable:
    """UTF-8 as text, without a byte order mark at its start."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return Unusable(f"invalid UTF-8 at byte {error.start}")
    return text or Unusable("empty text")


def described(value: object) -> str:
    """What kind of value it is, in words of JSON."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list() | tuple():
            return "a list"
        case Mapping():
            return "an object"
        case _:
            return f"of type {type(value).__name__}"


def strings(value: object) -> Iterator[str]:
    """Every string in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from strings(key)
            yield from strings(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from strings(inner)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key `{next(name for name in names if names.count(name) > 1)}` appears twice")
    return fields


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a valid JSON number")


parsed: Final = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse).decode
"""Return the value of a JSON text. Raises ValueError, also for NaN and a key that appears twice, and RecursionError."""
