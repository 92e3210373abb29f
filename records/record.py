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
    """One line of a file, with a field for every key that always has the same name.

    A field without a default is always written, as null where it is None; one with a default is left out where it has
    that value. Lines come from older and newer versions too: for a key that is missing, or has a value of another type,
    a reader finds None (or an empty text, list or map). Nobody changes one that was made.
    """

    step: Annotated[int | None, doc("number of the optimizer step, from 1", "steps")]
    time: Annotated[float | None, doc("when the record was written, since 1970 (UTC)", "s")] = field(
        default_factory=time.time
    )
    rest: dict[str, Any] = field(default_factory=dict, name="")
    """Keys without a field: those that carry a name, and what another version of xtrain has written."""


AnyRecord = TypeVar("AnyRecord", bound=Record)
