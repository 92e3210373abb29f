"""The line `ranks/<rank>.beat`, by which other processes know that a rank is alive and how far it is."""

import json
from pathlib import Path
from typing import Annotated, Final

from msgspec import Struct, ValidationError, convert, structs

from xtrain.records.lines import object_of
from xtrain.records.record import doc
from xtrain.regular_files import open_regular

# Bytes of the line. The size is fixed: the line is overwritten in place, and a reader never finds the rest of a longer
# one.
WIDTH: Final = 640


class Heartbeat(Struct, frozen=True, kw_only=True):
    """Heartbeat of a rank. Every key is required: a line without one is incomplete."""

    rank: Annotated[int, doc("the rank")]
    host: Annotated[str, doc("its machine")]
    pid: Annotated[int, doc("its process")]
    born: Annotated[int, doc("start time of the process; 0 if unknown", "clock ticks")]
    attempt: Annotated[int, doc("the attempt (start of the run) that the process belongs to, as in `run_start`")]
    alive: Annotated[int, doc("number of heartbeats written; increases as long as Python runs in the process")]
    time: Annotated[float, doc("since 1970, by the machine's own clock; for people only", "s")]
    step: Annotated[int, doc("the current step, from 1; 0 in set-up", "steps")]
    node: Annotated[str, doc("the current node of the plan")]
    marks: Annotated[int, doc("marks of this attempt; increases as long as the rank makes progress", "marks")]
    within: Annotated[int, doc("marks since the step began; the same on all ranks that are equally far", "marks")]
    lasting: Annotated[bool, doc("whether the current work may take long without a mark")]
    idle: Annotated[float, doc("since the last mark", "s")]
    place: Annotated[
        str,
        doc(
            "what the main thread is executing, once it has been there for two seconds, as "
            "`torch/distributed/x.py:120 wait`"
        ),
    ]
    debugger: Annotated[bool, doc("whether a Python debugger has stopped the process")]

    @property
    def progress(self) -> tuple[int, int]:
        """Return the rank's progress, comparable with other ranks."""
        return self.step, self.within

    def line(self) -> bytes:
        """Return the line: WIDTH bytes, if names are cut to the available length."""
        text = json.dumps(structs.asdict(self), separators=(",", ":"))  # ASCII, because file names may be invalid text
        return text.encode().ljust(WIDTH - 1) + b"\n"


def read_heartbeat(path: Path) -> Heartbeat | None:
    """Read a heartbeat; None if it is missing or incomplete."""
    try:
        with open_regular(path) as file:
            return convert(object_of(file.read(WIDTH)), Heartbeat)
    except (OSError, ValidationError):
        return None
