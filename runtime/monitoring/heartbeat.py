"""How far a rank has come: marks in memory, and the line `ranks/<rank>.beat` that tells other processes of them.

A mark is an addition and costs the step nothing. A thread writes the line about once a second, whatever the rank does
meanwhile (`watch.py`).
"""

import os
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from attrs import define, field

from xtrain.records.heartbeat import Heartbeat

# Marks that are remembered, for whoever looks at a rank that came to nothing.
TRAIL: Final = 64
# Ops that may take any time without a mark, as disks are slow.
LASTING: Final = frozenset({"tick.model", "step.await_copy", "step.put_off_save", "rollout.score"})


@define(eq=False)
class HeartbeatWriter:
    """The marks of this rank. Only its main thread makes them; any thread may read them.

    node: what is under way. step: the step under way, counted from 1; 0 before the first. marks: all of this start.
    within: marks since the step began, in which the ranks of a run agree where they are equally far. lasting: the node
    may take any time. limit: seconds that it may take instead of what the run allows. on_node: called with every node
    that begins.
    """

    node: str = ""
    step: int = 0
    marks: int = 0
    lasting: bool = True
    limit: float | None = None
    trail: deque[str] = field(factory=lambda: deque(maxlen=TRAIL))
    on_node: Callable[[str], None] | None = None
    _before: int = 0

    def begin(self, step: int) -> None:
        """A step begins, counted from 1."""
        self.step, self._before = step, self.marks

    def at(self, node: str, lasting: bool = False) -> None:
        """A node begins."""
        self.node = node
        self.lasting = lasting
        self.marks += 1
        self.trail.append(node)
        if self.on_node is not None:
            self.on_node(node)

    def mark(self) -> None:
        """The node goes on: another batch, another token, another question to the other ranks."""
        self.marks += 1

    @property
    def within(self) -> int:
        return self.marks - self._before


def own_host() -> str:
    """The name of this machine, as lines have it."""
    return socket.gethostname()[:64]


@define
class BeatFile:
    """The line of this rank. What goes wrong with it is no matter of the training."""

    path: Path
    rank: int
    attempt: int
    alive: int = 0
    _host: str = field(factory=own_host)
    _born: int = field(factory=lambda: born(os.getpid()))

    def write(self, beat: HeartbeatWriter, idle: float, place: str, debugger: bool) -> None:
        """Write the line anew. The file is opened each time: other machines then see what was written."""
        self.alive += 1
        heartbeat = Heartbeat(
            rank=self.rank,
            host=self._host,
            pid=os.getpid(),
            born=self._born,
            attempt=self.attempt,
            alive=self.alive,
            time=round(time.time(), 3),
            step=beat.step,
            node=beat.node[:120],
            marks=beat.marks,
            within=beat.within,
            lasting=beat.lasting,
            idle=round(idle, 1),
            place=place[-120:],
            debugger=debugger,
        )
        line = heartbeat.line()
        with suppress(OSError):
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.pwrite(fd, line, 0)
            finally:
                os.close(fd)


def born(pid: int) -> int:
    """When a process of this machine began, in clock ticks; 0 where that is not to be known."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def process_state(pid: int) -> str:
    """The state of a process of this machine as the kernel names it: R, S, D, T (stopped), t (traced), Z; empty where
    there is none, or no way to know."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def is_same_process(reading: Heartbeat) -> bool:
    """Whether the process of this machine that has written a line is there, and has not ended."""
    return process_state(reading.pid) not in ("", "Z", "X") and born(reading.pid) == reading.born


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name of the program, which may have blanks in it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
