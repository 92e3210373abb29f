"""Canonical form of JSON values and their digests, independent of key order and of tuples or lists.

A plan keeps the order of its keys in memory; after it is read back from a run directory, its keys are sorted and its
tuples are lists. Everything named by a digest of such values uses this module.
"""

import json
import os
from collections.abc import Iterable, Mapping
from functools import reduce
from hashlib import blake2b
from operator import add
from typing import Any, Final

# Text formats of the canonical form. Digests on disk were computed with these, so none may change.
PLAN: Final = {"separators": (",", ":"), "ensure_ascii": False, "allow_nan": False}
DATA: Final = {"separators": (", ", ": ")}
SEAL: Final = {"separators": (",", ":")}

# Most values of a plan have these types, and checking for a Mapping is slow.
SINGLE: Final = (str, int, float, bool, type(None))
AS_THEY_ARE: Final = frozenset((str, int, bool, type(None)))


DIGEST_BYTES = 8  # 16 hex digits: the probability that two of a million plans share one is 3e-8


def canonical(value: Any) -> Any:
    """Return `value` with the keys of every mapping as sorted strings and every tuple as a list."""
    if isinstance(value, SINGLE):
        return value
    if isinstance(value, Mapping):
        named = {str(key): item for key, item in value.items()}
        return {key: canonical(named[key]) for key in sorted(named)}
    if isinstance(value, list | tuple):
        return [canonical(item) for item in value]
    return value


def whole_numbers(value: Any) -> Any:
    """Return `value` with 2.0 as 2, for uses that do not distinguish them."""
    # A plan has a hundred thousand values: unchanged values take no call.
    if isinstance(value, dict | Mapping):
        return {str(key): item if type(item) in AS_THEY_ARE else whole_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [item if type(item) in AS_THEY_ARE else whole_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def text(content: Any, writing: dict[str, Any]) -> str:
    """Return the canonical form of JSON values as text, in the format PLAN, DATA or SEAL. Raises TypeError for values
    that are not JSON."""
    return json.dumps(canonical(content), **writing)


def digest(content: Any, writing: dict[str, Any], *, size: int) -> str:
    """Return BLAKE2b over `text` as 2 · `size` hex digits. Raises TypeError for values that are not JSON."""
    return blake2b(text(content, writing).encode(), digest_size=size).hexdigest()


def digest_of_amounts(content: Any, writing: dict[str, Any], *, size: int) -> str:
    """Return the digest of the `whole_numbers` of JSON values."""
    named = whole_numbers(content)  # every key is a string by now, and json sorts strings itself
    return blake2b(json.dumps(named, sort_keys=True, **writing).encode(), digest_size=size).hexdigest()


def portable(path: str) -> str:
    """Return a path in portable form: `./data//x` becomes `data/x`."""
    return os.path.normpath(path).replace(os.sep, "/")


def plain_sum(numbers: Iterable[float]) -> float:
    """Add numbers one after the other. From Python 3.12 on, the built-in `sum` compensates rounding, so plan ids would
    depend on the version."""
    return reduce(add, numbers, 0)


def fingerprint(content: Any) -> str:
    """Return 16 hex digits over the canonical form of JSON values, with 2.0 as 2."""
    return digest_of_amounts(content, PLAN, size=DIGEST_BYTES)
