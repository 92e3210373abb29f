"""How a run has ended, from its events."""

from pathlib import Path

from xtrain.records.events import events_since
from xtrain.records.paths import EVENTS_FILE
from xtrain.records.run_events import FailureEvent, RunEndEvent
from xtrain.records.start_events import RunStartEvent


def last_end(directory: Path) -> RunEndEvent | None:
    """How a run ended last; None where it has not."""
    ends = [each for each in events_since(directory / EVENTS_FILE) if isinstance(each, RunEndEvent)]
    return ends[-1] if ends else None


def would_fail_again(directory: Path) -> bool:
    """Return True if the last start of a run failed over something that all ranks found alike, such as a loss that is
    not finite: another start would come to the same."""
    agreed = False
    for event in events_since(directory / EVENTS_FILE):
        if isinstance(event, RunStartEvent):
            agreed = False
        elif isinstance(event, FailureEvent):
            agreed = agreed or event.agreed
    return agreed
