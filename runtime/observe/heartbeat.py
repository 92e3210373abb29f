"""Heartbeat of a rank, the seconds for which it waits for others, and long waits for one rank of each machine.

The line `ranks/<rank>.beat` shows the progress of a rank to other processes.
"""

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from threading import get_ident
from time import perf_counter
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from attrs import define, field
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.distributed import _functional_collectives as functional

from xtrain.plan.plan import Plan
from xtrain.records.status import Heartbeat
from xtrain.runtime.base.state import Rank

# Marks that are kept for the report of a stuck rank.
TRAIL: Final = 64
# Ops that may take any time without a mark, as disks are slow.
LASTING: Final = frozenset({"tick.model", "step.await_copy", "step.put_off_save", "rollout.score"})


@define(eq=False)
class HeartbeatWriter:
    """Marks of this rank's progress. Only its main thread sets them; any thread may read them.

    node: current node. step: current step, counted from 1; 0 before the first. marks: number since this start. within:
    marks since the step began, equal on ranks that are at the same point. lasting: the node may take any time. limit:
    seconds that it may take instead of the run's limit. on_node: called with every node that begins.
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
        """Begin a step, counted from 1."""
        self.step, self._before = step, self.marks

    def at(self, node: str, lasting: bool = False) -> None:
        """Begin a node."""
        self.node = node
        self.lasting = lasting
        self.marks += 1
        self.trail.append(node)
        if self.on_node is not None:
            self.on_node(node)

    def mark(self) -> None:
        """Mark progress within a node: another batch, another token, another question to the other ranks."""
        self.marks += 1

    @property
    def within(self) -> int:
        return self.marks - self._before


def own_host() -> str:
    """Return the name of this machine as heartbeats have it."""
    return socket.gethostname()[:64]


@define
class BeatFile:
    """Heartbeat file of this rank. Errors of writing it are ignored."""

    path: Path
    rank: int
    attempt: int
    alive: int = 0
    _host: str = field(factory=own_host)
    _born: int = field(factory=lambda: born(os.getpid()))

    def write(self, beat: HeartbeatWriter, idle: float, place: str, debugger: bool) -> None:
        """Replace the line. The file is opened each time, so that other machines see the new content."""
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
    """Return the start time of a process of this machine in clock ticks; 0 if unknown."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def process_state(pid: int) -> str:
    """Return the kernel's state of a process of this machine: R, S, D, T (stopped), t (traced), Z; empty if it does not
    exist or is unknown."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def is_same_process(reading: Heartbeat) -> bool:
    """Return True if the process that wrote the line, on this machine, is still running."""
    return process_state(reading.pid) not in ("", "Z", "X") and born(reading.pid) == reading.born


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the program's name, which may contain blanks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


# Axes whose ranks exchange something in the middle of a block.
INSIDE: Final = ("tp", "ring", "ulysses", "ep")


class Waits:
    """Waiting time of this process. seconds: spent waiting in the training thread. measured: False if it is unknown."""

    def __init__(self) -> None:
        self.measured = False
        self._thread = 0
        self._installed = False
        self._waited = 0.0
        self._lock = threading.Lock()
        self._last_bucket: float | None = None
        self._for_buckets = 0.0

    @property
    def seconds(self) -> float:
        return self._waited + self._for_buckets

    def begin(self, plan: Plan, rank: Rank) -> None:
        """Start to measure if this rank can; a rank that is alone waits for nobody."""
        self._thread = get_ident()
        compiled = any(node.op == "setup.compile" for node in plan.nodes)
        axes = (*plan.mesh.axes, *plan.mesh.expert_axes)
        hidden = compiled and any(axis.size > 1 for axis in axes if axis.name in INSIDE)
        self.measured = rank.world_size == 1 or (rank.device.type == "cpu" and not hidden)
        if rank.world_size > 1 and self.measured and not self._installed:
            self._installed = True
            self._time_works()
            self._time_tensors()

    def bucket_sent(self, *, last: bool) -> Callable[[], None]:
        """Start a bucket of DDP gradients; the result is called when the bucket has arrived, by any thread.

        After the last bucket nothing is left to compute: from then on the rank waits.
        """
        self._last_bucket = perf_counter() if last else None

        def came() -> None:
            with self._lock:
                if self._last_bucket is not None:
                    now = perf_counter()
                    self._for_buckets += now - self._last_bucket
                    self._last_bucket = now

        return came

    def _time_works(self) -> None:
        original = Work.wait

        def wait(work: Work, *args: Any, **kwargs: Any) -> Any:
            if get_ident() != self._thread:
                return original(work, *args, **kwargs)
            began = perf_counter()
            try:
                return original(work, *args, **kwargs)
            finally:
                self._waited += perf_counter() - began

        Work.wait = wait  # pyright: ignore[reportAttributeAccessIssue]

    def _time_tensors(self) -> None:
        original = functional.wait_tensor

        def wait_tensor(tensor: Tensor) -> Tensor:
            if torch.compiler.is_compiling() or get_ident() != self._thread:
                return original(tensor)
            began = perf_counter()
            try:
                return original(tensor)
            finally:
                self._waited += perf_counter() - began

        functional.wait_tensor = wait_tensor


WAITS = Waits()
"""One per process, because it patches torch's wait functions of the process."""


T = TypeVar("T")
# Seconds between two questions: short, so that short work ends soon, and growing, so that long work is not disturbed.
SOONEST: Final = 0.05
LATEST: Final = 2.0


def first_of_machine(rank: Rank, work: Callable[[], T], beat: HeartbeatWriter) -> T | None:
    """Call `work` on the first rank of every machine; returns its result there and None elsewhere, once all are done.

    Collective. With several ranks the work runs in a thread, and all ranks ask each other at intervals whether it is
    done. So no collective lasts long, hours of work do not reach the time limit of the process group, and a lost rank
    is noticed meanwhile. Raises what the work raises on the rank that runs it.
    """
    if rank.world_size == 1:
        return work()
    mine = _begun(work) if rank.local_rank == 0 else None
    pause = SOONEST
    while True:
        if mine is not None and wait([mine], pause).done and (error := mine.exception()) is not None:
            raise error
        # Work that has failed meanwhile is not done: the next round raises its error before the ranks agree.
        done = torch.tensor([float(mine is None or (mine.done() and mine.exception() is None))])
        dist.all_reduce(done, op=dist.ReduceOp.MIN)
        beat.mark()
        if done.item():
            return None if mine is None else mine.result()
        pause = min(2 * pause, LATEST)


def _begun(work: Callable[[], T]) -> Future[T]:
    """Start a call in a thread that does not keep the process alive, unlike an executor's."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="preparing data", daemon=True).start()
    return future
