"""Records passed through as NDJSON, for programs: `{"kind": "metrics" | "event", …}`.

Of a run that is gone without a word, the last line says so: `{"kind": "lost", "step": …, "why": …}`.
"""

import json
from typing import TextIO

import msgspec

from xtrain.records.event import Event
from xtrain.records.lines import as_object, plain_value
from xtrain.records.record import Record
from xtrain.tui.lines.drawer import Drawer
from xtrain.tui.state import RunState


class JsonView(Drawer):
    """View of one JSON line per record, with its fields as written, and `kind`."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def shows(self, record: Record) -> bool:
        return True

    def draw(self, state: RunState, record: Record) -> None:
        self._out.write(line(record) + "\n")

    def lost(self, state: RunState, why: str) -> None:
        self._out.write(json.dumps({"kind": "lost", "step": state.step, "why": why}) + "\n")


def line(record: Record) -> str:
    """Return `record` as one line of strict JSON."""
    found = {"kind": "event" if isinstance(record, Event) else "metrics"}
    # An alert has a kind of its own, which says less here than its message.
    found |= {key: value for key, value in as_object(record).items() if key != "kind"}
    return json.dumps(plain_value(msgspec.to_builtins(found)))
