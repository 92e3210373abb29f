"""Numbers in the fields of a record, or why one cannot be used."""

from typing import Any

import numpy as np

from xtrain.runtime.data.records.records import Unusable
from xtrain.runtime.data.records.texts import described

LARGEST = float(np.finfo(np.float32).max)


def number(value: Any, what: str) -> float | Unusable:
    """A finite number, as float32 can hold it."""
    if isinstance(value, Unusable):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        return Unusable(f"{what} is {described(value)}, not a number")
    if value != value:
        return Unusable(f"{what} is NaN")
    # Whole numbers are compared as they are: those of JSON can be too large for a float of any kind.
    if abs(value) > LARGEST:
        return Unusable(f"{what} is {shown(value)}, too large for float32")
    return float(value)


def shown(value: Any) -> str:
    """A number in a few digits; of anything else what it is."""
    if isinstance(value, int) and abs(value) >= 10**20:
        return "a number of more than 20 digits"
    return f"{value:g}" if isinstance(value, float) else str(value) if isinstance(value, int) else described(value)
