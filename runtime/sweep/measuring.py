"""What the files of a trial say: how far it is, what it has measured, and why it could not begin."""

import math
from collections.abc import Sequence
from pathlib import Path

from xtrain.records.lines import objects_since
from xtrain.records.paths import METRICS_FILE
from xtrain.runtime.run_directory.ends import last_end


def last_lines(log: Path) -> str:
    """The error at the end of a log."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    words = ("error", "failure")
    found = (place for place in reversed(range(len(lines))) if any(word in lines[place] for word in words))
    place = next(found, len(lines))
    return " ".join(each.strip() for each in lines[place : place + 2]) or f"see {log}"


def trained_steps(directory: Path) -> int:
    """The step at which a run ended last; 0 where it has not."""
    end = last_end(directory)
    return 0 if end is None else end.step or 0


def measured(directory: Path, key: str, step: int) -> tuple[float | None, int | None]:
    """The last value of a metric up to a step, and the tokens seen by the last logged step up to there."""
    rows = [row for row in objects_since(directory / METRICS_FILE) if int(row.get("step", 0)) <= step]
    return last_number(rows, key), _whole(last_number(rows, "tokens"))


def last_number(rows: Sequence[dict], key: str) -> float | None:
    """The last value of a key, None where it is not finite."""
    values = [row[key] for row in rows if key in row]
    if not values or not isinstance(values[-1], int | float) or not math.isfinite(values[-1]):
        return None
    return float(values[-1])


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
