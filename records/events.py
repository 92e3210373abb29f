"""The lines of `events.jsonl`: every event by its name, and how one is read."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from xtrain.records.event import Event, UnknownEvent, kind_of
from xtrain.records.lines import objects_since, read
from xtrain.records.run_events import RUN_EVENTS
from xtrain.records.start_events import START_EVENTS
from xtrain.records.step_events import STEP_EVENTS

EVENT_TYPES: Final[dict[str, type[Event]]] = {
    kind_of(kind): kind for kind in (*START_EVENTS, *STEP_EVENTS, *RUN_EVENTS)
}


def event_of(found: dict[str, Any]) -> Event:
    """Convert a JSON object to the event named by its key `event`; an `UnknownEvent` for unknown names."""
    name = found.get("event")
    if isinstance(name, str) and name in EVENT_TYPES:
        return read(EVENT_TYPES[name], found)
    unknown = read(UnknownEvent, {key: value for key, value in found.items() if key != "event"})
    unknown.rest = {"event": name, **unknown.rest}
    return unknown


def events_since(path: Path, offset: int = 0) -> list[Event]:
    """Return the events in a file from a byte offset on; empty without a file. Raises OSError."""
    return events_of(objects_since(path, offset))


def events_of(found: Iterable[dict[str, Any]]) -> list[Event]:
    return [event_of(each) for each in found]
