"""Records for tests, of as few keys as a test is about."""

import time
from typing import Any

from xtrain.records.events import event_of
from xtrain.records.lines import Event, read
from xtrain.records.metrics import StepMetrics
from xtrain.runtime.observe.records import Records


def event(name: str, step: int, **fields: Any) -> Event:
    """An event that says no more than what is given."""
    return event_of({"time": time.time(), "step": step, "event": name, **fields})


def metrics(step: int, **fields: Any) -> StepMetrics:
    return read(StepMetrics, {"step": step, **fields})


def log(records: Records, step: int, **fields: Any) -> None:
    """A step has ended, and this is its record."""
    records.log(metrics(step, **fields))
    records.flush(step)
