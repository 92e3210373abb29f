"""What all lines of a run's files have in common."""

import time
from collections.abc import Iterable
from typing import Annotated, Any, TypeVar

from msgspec import Meta, Struct, field


def doc(meaning: str, unit: str = "") -> Meta:
    """Return the documentation of a key, with the unit of its value."""
    return Meta(description=meaning, extra={"unit": unit})


def one_of(words: Iterable[str]) -> str:
    """Return the allowed words of a value, as documentation names them."""
    *others, last = (f"`{word}`" for word in words)
    return f"{', '.join(others)} or {last}"


class Record(Struct, kw_only=True):
    """One line of a file, with a field for every key of a fixed name. Records are not modified after creation.

    A field without a default is always written, as null if it is None; a field with a default is left out if it has
    that value. Lines may come from older and newer versions: a missing key, or one with a value of another type, is
    read as None (or an empty text, list or map).
    """

    step: Annotated[int | None, doc("number of the optimizer step, from 1", "steps")]
    time: Annotated[float | None, doc("when the record was written, since 1970 (UTC)", "s")] = field(
        default_factory=time.time
    )
    rest: dict[str, Any] = field(default_factory=dict, name="")
    """Keys without a field: keys that contain a name, and keys of other versions of xtrain."""


AnyRecord = TypeVar("AnyRecord", bound=Record)
