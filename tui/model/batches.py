"""Some records of `metrics.jsonl` at once: their numbers key by key, and which of them is the last of a step."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy import ndarray

from ..words import number
from .columns import floats

# A record of `metrics.jsonl` as it stands there: of a column all keys are alike.
Values = dict[str, Any]


def by_key(run: list[Values]) -> list[tuple[str, Any, ndarray]]:
    """Each key with numbers, at which of the records it is, and its values there."""
    shapes = dict.fromkeys(map(tuple, run))
    keys = dict.fromkeys(key for shape in shapes for key in shape if key != "step")
    found: list[tuple[str, Any, ndarray]] = []
    for key in keys:
        if all(key in shape for shape in shapes):
            where, values = slice(None), [record[key] for record in run]
        else:
            pairs = [(place, record[key]) for place, record in enumerate(run) if key in record]
            where, values = np.array([place for place, _ in pairs]), [value for _, value in pairs]
        numbers = floats(values)
        if numbers is not None:
            found.append((key, where, numbers))
    return found


def is_evaluation(record: Values) -> bool:
    """Whether it holds losses of evaluations and nothing of a step."""
    return all(key in ("step", "time") or key.startswith("eval/") for key in record)


def last_own(records: Sequence[Values]) -> int:
    """Where the records of the last step begin that has more than an evaluation."""
    place = len(records) - 1
    while place > 0 and is_evaluation(records[place]):
        place -= 1
    while place > 0 and records[place - 1]["step"] == records[place]["step"]:
        place -= 1
    return max(place, 0)


def seconds_after(record: Values, last: Mapping[str, Any]) -> float:
    """How much later one was written than another, by the clock of its writer."""
    return (number(record.get("time")) or 0.0) - (number(last.get("time")) or 0.0)
