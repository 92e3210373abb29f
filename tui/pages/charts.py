"""Charts of all metrics: their order, units, planned values, and the filter by globs."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Final, get_args, get_origin, get_type_hints

from xtrain.records.metrics import FREE_NAMES, StepMetrics
from xtrain.tui.curves.axis import Unit
from xtrain.tui.curves.picture import Level
from xtrain.tui.model.columns import EVALUATIONS
from xtrain.tui.pages.comparison import Compared, metric_keys

# Metrics that come first, in this order; evaluations follow them.
FIRST: Final = (
    "loss", "objective", "reward", "grad_norm", "lr", "tokens_per_second", "memory_bytes", "step_seconds", "mfu",
    "gpu_utilization", "gpu_temperature", "gpu_power",
)  # fmt: skip
_HINTS: Final = get_type_hints(StepMetrics, include_extras=True)
_UNITS: Final[dict[str, Unit]] = {"s": "seconds", "bytes": "bytes", "tokens": "count", "rows": "count"}


def chart_keys(runs: Sequence[Compared], query: str = "") -> tuple[str, ...]:
    """Return the metrics of the runs that match a query, the most important first."""

    def order(key: str) -> tuple[int, bool]:
        return FIRST.index(key) if key in FIRST else len(FIRST), not key.startswith(EVALUATIONS)

    return tuple(sorted((key for key in metric_keys(runs) if matches(key, query)), key=order))


def matches(key: str, query: str) -> bool:
    """Return True if a key matches one of the words of a query: globs, and texts that it contains; all for an empty
    query."""
    words = query.casefold().split()
    name = key.casefold()
    return not words or any(fnmatchcase(name, word) if set(word) & set("*?[") else word in name for word in words)


def unit_of(key: str) -> Unit:
    """Return the unit of a metric, by its documentation."""
    name = "/".join((*key.split("/")[:1], "NAME", *key.split("/")[2:]))
    hint = _HINTS.get(key)
    notes = get_args(hint)[1:] if hint is not None and get_origin(hint) is not None else (FREE_NAMES.get(name),)
    unit = next((str((note.extra or {}).get("unit", "")) for note in notes if note is not None), "")
    if unit.startswith("share") or key.rpartition("/")[2] in ("acc", "acc_norm", "acc_bytes"):
        return "share"
    return _UNITS.get(unit, "number")


def levels(runs: Sequence[Compared], key: str) -> list[Level]:
    """Return the planned values of a metric: one without a color if all runs share it."""
    found = [(run, value) for run in runs if (value := _planned(run, key)) is not None]
    if len({value for _, value in found}) < 2:
        return [Level(name="planned", value=value) for _, value in found[:1]]
    return [Level(name=f"planned {run.label}", value=value, color=run.color) for run, value in found]


def _planned(run: Compared, key: str) -> float | None:
    board = run.board
    plan = board.planned if board is not None else None
    if board is None or plan is None:
        return None
    if key == "memory_bytes":  # on a CPU a process holds more than tensors, which the plan does not count
        return None if board.run.start is not None and board.run.start.device == "cpu" else plan.memory_bytes
    names = {"step_seconds": "step", "tokens_per_second": "tokens_per_second", "mfu": "mfu"}
    return getattr(plan.times, names[key]) if plan.times is not None and key in names else None
