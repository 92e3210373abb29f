"""How a run has ended, from its events."""

from pathlib import Path

from ...records.events import events_since
from ...records.paths import EVENTS_FILE
from ...records.run_events import RunEndEvent


def last_end(directory: Path) -> RunEndEvent | None:
    """How a run ended last; None where it has not."""
    ends = [each for each in events_since(directory / EVENTS_FILE) if isinstance(each, RunEndEvent)]
    return ends[-1] if ends else None
