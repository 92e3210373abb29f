"""What all lines of `events.jsonl` have in common."""

from xtrain.records.record import Record


class Event(Record, tag_field="event", tag=""):
    """Something that happened: `step` optimizer steps had ended. Its class says what."""

    @property
    def event(self) -> str:
        """`run_start`, `eval`, …: the key of that name."""
        return kind_of(type(self))


def kind_of(event: type[Event]) -> str:
    """Return the name of an event in its line: `run_start`, `eval`, …."""
    return str(event.__struct_config__.tag)


class UnknownEvent(Event, tag=""):
    """An event of another version of xtrain, or a line without a name: all it says is in `rest`."""

    @property
    def event(self) -> str:
        name = self.rest["event"]
        return "" if name is None else str(name)
