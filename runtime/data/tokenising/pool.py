"""Units tokenised by several processes, their results in reading order; a process that dies is replaced."""

import os
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from itertools import chain
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING

import numpy as np
from attrs import define, field

from xtrain.runtime.data.errors import DataError
from xtrain.runtime.data.tokenising.worker import EncodedUnit, WorkerFailure, encode_unit, one_thread

if TYPE_CHECKING:
    from xtrain.runtime.data.documents.encoder import DocumentEncoder
    from xtrain.runtime.data.sources.source import DataSource, SourceUnit

# Below this much input, starting processes takes longer than what they save.
SMALL = 8 << 20
# Units at a worker: one is tokenised, one waits.
AT_WORKER = 2
# Units that are read, worked on or waiting for their turn are at most WINDOW a worker, and unless it is a single one
# no more than WINDOW_BYTES a worker: this bounds the memory of the process that reads and writes.
WINDOW = 4
WINDOW_BYTES = 32 << 20
DEATHS = 3


def encoded_units(
    source: "DataSource", encoder: "DocumentEncoder", units: "Iterable[SourceUnit]", dtype: np.dtype, jobs: int | None
) -> "Generator[tuple[SourceUnit, EncodedUnit]]":
    """Each unit with its documents, in the order of `units`, which does not depend on `jobs`.

    `jobs` processes work, or this one alone if it is 1; with None, as many as there are cores, unless there is little
    to do. Raises what a unit raises when its turn comes, and DataError for a unit at which three workers died.
    """
    caught = _caught(units)
    first: list[SourceUnit | WorkerFailure] = []
    if jobs is None:
        jobs = _cores()
        size = 0
        for unit in caught if jobs > 1 else ():
            first.append(unit)
            size += _bytes(unit)
            if size >= SMALL:
                break
        jobs = jobs if size >= SMALL else 1
    caught = chain(first, caught)
    if jobs > 1:
        with Pool(source, encoder, dtype, jobs) as pool:
            yield from pool.encoded(caught)
        return
    for unit in caught:
        if isinstance(unit, WorkerFailure):
            raise unit.error
        with one_thread():
            result = encode_unit(source, encoder, unit, dtype)
        yield unit, result


def _caught(units: "Iterable[SourceUnit]") -> "Iterator[SourceUnit | WorkerFailure]":
    """The units, and what getting at the next one raised, which has its turn when theirs is over."""
    try:
        yield from units
    except Exception as error:
        yield WorkerFailure(error, "")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@define(eq=False)
class _Slot:
    """A unit between reading and writing."""

    unit: "SourceUnit | WorkerFailure"
    result: EncodedUnit | WorkerFailure | None = None
    deaths: int = 0


@define(eq=False)
class _Worker:
    process: subprocess.Popen
    connection: Connection
    slots: deque[_Slot] = field(factory=deque)
    """What it has been given and not answered, oldest first: that is what it is working on."""
    ready: bool = False


class Pool:
    """`jobs` worker processes, each a fresh interpreter: what threads of this one hold is not copied into them."""

    def __init__(self, source: "DataSource", encoder: "DocumentEncoder", dtype: np.dtype, jobs: int) -> None:
        self._setup = ForkingPickler.dumps((source, encoder, dtype))
        self._jobs = jobs
        self._workers: list[_Worker] = []
        self._todo: deque[_Slot] = deque()
        self._failed_starts = 0

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *exception: object) -> None:
        for worker in self._workers:
            worker.connection.close()
            worker.process.kill()
        for worker in self._workers:
            worker.process.wait()

    def encoded(self, units: "Iterator[SourceUnit | WorkerFailure]") -> "Iterator[tuple[SourceUnit, EncodedUnit]]":
        """Each unit with its documents, in order; a Failure is raised at its turn, and what `encoded_units` raises."""
        self._workers = [self._start() for _ in range(self._jobs)]
        for worker in self._workers:
            self._send_job(worker)
        window: deque[_Slot] = deque()
        in_memory, following = 0, next(units, None)
        while window or following is not None:
            while following is not None and self._has_room(len(window), in_memory, following):
                window.append(slot := _Slot(following))
                if isinstance(following, WorkerFailure):
                    slot.result = following
                else:
                    self._todo.append(slot)
                in_memory += _bytes(following)
                self._deal()
                following = next(units, None)
            result = window[0].result
            if result is None:
                self._listen()
                continue
            slot = window.popleft()
            in_memory -= _bytes(slot.unit)
            if isinstance(result, WorkerFailure):
                raise _raised(result)
            assert not isinstance(slot.unit, WorkerFailure)
            yield slot.unit, result

    def _has_room(self, count: int, in_memory: int, unit: "SourceUnit | WorkerFailure") -> bool:
        return not count or (count < WINDOW * self._jobs and in_memory + _bytes(unit) <= WINDOW_BYTES * self._jobs)

    def _deal(self) -> None:
        while self._todo:
            worker = min(self._workers, key=lambda each: len(each.slots))
            if len(worker.slots) == AT_WORKER:
                return
            slot = self._todo.popleft()
            worker.slots.append(slot)
            try:
                worker.connection.send(slot.unit)
            except OSError:
                self._replace(worker)

    def _listen(self) -> None:
        """Wait for answers, and give those who gave one more to do."""
        by_connection = {worker.connection: worker for worker in self._workers}
        for connection in wait(list(by_connection)):
            assert isinstance(connection, Connection)
            worker = by_connection[connection]
            try:
                answer = connection.recv()
            except (EOFError, OSError):
                self._replace(worker)
                continue
            if worker.ready:
                worker.slots.popleft().result = answer
            elif isinstance(answer, WorkerFailure):
                raise _raised(answer)
            worker.ready, self._failed_starts = True, 0
        self._deal()

    def _replace(self, worker: _Worker) -> None:
        """A worker has died: what it had not answered is done again, if it was not the third to die of it."""
        worker.connection.close()
        worker.process.kill()  # one that has only closed its connection
        status = worker.process.wait()
        how = f"killed by signal {-status}" if status < 0 else f"ended with status {status}"
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts == DEATHS * self._jobs:
                raise RuntimeError(f"the tokenizer processes do not start: {how}")
        elif worker.slots:
            slot = worker.slots[0]
            slot.deaths += 1
            if slot.deaths == DEATHS:
                assert not isinstance(slot.unit, WorkerFailure)
                slot.result = WorkerFailure(_death(slot.unit, how), "")
                worker.slots.popleft()
        self._todo.extendleft(reversed(worker.slots))
        self._workers[self._workers.index(worker)] = fresh = self._start()
        self._send_job(fresh)

    def _start(self) -> _Worker:
        ours, theirs = Pipe()
        with theirs:
            serve = f"from xtrain.runtime.data.tokenising.worker import serve; serve({theirs.fileno()})"
            # Not multiprocessing's own: that would run the main module again, which in a rank imports torch.
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", f"import sys; sys.path[:] = {sys.path!r}; {serve}"],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a library prints must not get into what this process prints
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"},
            )
        return _Worker(process, ours)

    def _send_job(self, worker: _Worker) -> None:
        try:
            worker.connection.send_bytes(self._setup)
        except OSError:
            self._replace(worker)


def _raised(failure: WorkerFailure) -> BaseException:
    """The error of a worker, with where it came from."""
    if failure.trace:
        failure.error.add_note(failure.trace)
    return failure.error


def _bytes(unit: "SourceUnit | WorkerFailure") -> int:
    """What it takes in memory: of a packed file more than on disk."""
    if isinstance(unit, WorkerFailure):
        return 0
    return max(unit.size, len(unit.part)) if isinstance(unit.part, bytes) else unit.size


def _death(unit: "SourceUnit", how: str) -> DataError:
    return DataError(
        f"the process that tokenised this part of the data was {how}, {DEATHS} times",
        path=unit.path,
        line=unit.line,
        remedy="Signal 9 usually means too little memory: use fewer --jobs, or look for a huge record here.",
    )
