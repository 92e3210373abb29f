"""JSON as others have written it, without what readers of JSON disagree about."""

import math
from json.decoder import JSONDecoder
from typing import Any, Final

MOST_DIGITS: Final = 40  # of a whole number: more than any size has


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"{text} is too large")
    return number


def _whole(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"{text[:MOST_DIGITS]}… is too large")
    return int(text)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object that has these keys. Raises ValueError where one is given twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"`{twice}` is given twice")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


# Raises ValueError for a key that is given twice, for numbers that no size has, and for NaN and infinity; and
# RecursionError for lists that are nested too deeply.
STRICT: Final = JSONDecoder(
    parse_constant=_refuse_constant, parse_float=_finite, parse_int=_whole, object_pairs_hook=_once
)
