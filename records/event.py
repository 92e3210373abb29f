"""What all lines of `events.jsonl` have in common."""

from xtrain.records.record import Record


class Event(Record, tag_field="event", tag=""):
    """An event after `step` optimizer steps. Its class defines its meaning."""

    @property
    def event(self) -> str:
        """Name of the event, the key `event`: `run_start`, `eval`, …."""
        return kind_of(type(self))


def kind_of(event: type[Event]) -> str:
    """Return the name of an event in its line: `run_start`, `eval`, …."""
    return str(event.__struct_config__.tag)


class UnknownEvent(Event, tag=""):
    """An event of another version of xtrain, or a line without a name: all its keys are in `rest`."""

    @property
    def event(self) -> str:
        name = self.rest["event"]
        return "" if name is None else str(name)
