"""The line `ranks/<rank>.beat`, by which other processes know that a rank is alive and how far it is."""

import json
from pathlib import Path
from typing import Annotated, Final

from msgspec import Struct, ValidationError, convert, structs

from .lines import object_of
from .record import doc

# Bytes of the line. One size for ever: it is written over itself, and a reader never finds the rest of a longer one.
WIDTH: Final = 640


class Heartbeat(Struct, frozen=True, kw_only=True):
    """Where a rank is. Every key is always there: a line without one of them is not whole."""

    rank: Annotated[int, doc("its number")]
    host: Annotated[str, doc("name of its machine")]
    pid: Annotated[int, doc("number of its process")]
    born: Annotated[
        int, doc("when the process began, as its number may be given again; 0 where nobody knows", "clock ticks")
    ]
    attempt: Annotated[int, doc("which start of the run it belongs to, from 1")]
    alive: Annotated[int, doc("lines it has written: moves while any of its Python runs", "lines")]
    time: Annotated[float, doc("when the line was written, since 1970 (UTC)", "s")]
    step: Annotated[int, doc("the step under way, from 1; 0 before the first", "steps")]
    node: Annotated[str, doc("the node that is under way")]
    marks: Annotated[int, doc("marks of progress since it started: moves while its main thread gets on", "marks")]
    within: Annotated[int, doc("marks since the step began, by which ranks are compared", "marks")]
    lasting: Annotated[bool, doc("the node may take any time without a mark")]
    idle: Annotated[float, doc("time without a mark", "s")]
    place: Annotated[str, doc("file, line and function that the main thread is in, where that has been some seconds")]
    debugger: Annotated[bool, doc("somebody looks at the process")]

    @property
    def progress(self) -> tuple[int, int]:
        """How far the rank has come, against others."""
        return self.step, self.within

    def line(self) -> bytes:
        """What is written: WIDTH bytes, as long as names are cut to what fits."""
        text = json.dumps(structs.asdict(self), separators=(",", ":"))  # in ASCII: names of files may be no text
        return text.encode().ljust(WIDTH - 1) + b"\n"


def read_heartbeat(path: Path) -> Heartbeat | None:
    """What the line says; None where there is none, or not a whole one."""
    try:
        return convert(object_of(path.read_bytes()[:WIDTH]), Heartbeat)
    except (OSError, ValidationError):
        return None
