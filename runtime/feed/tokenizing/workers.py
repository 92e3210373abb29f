"""Tokenization of the units of a source, in this process or in a pool of processes, with results in reading order.

The pool replaces a process that dies. A unit that kills its process repeatedly becomes an error.
"""

import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import define, field, frozen

from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.records import BadRecord

if TYPE_CHECKING:
    from xtrain.runtime.feed.documents import DocumentEncoder, TokenDocument
    from xtrain.runtime.feed.records import SourceRecord
    from xtrain.runtime.feed.sources.source import DataSource, SourceUnit


BATCH_RECORDS = 1024
BATCH_CHARACTERS = 1 << 22


@frozen(kw_only=True, eq=False)
class EncodedUnit:
    """The documents of a unit."""

    tokens: np.ndarray
    """uint16 or uint32 [tokens]."""
    lengths: np.ndarray
    """int64 [documents]."""
    trained: np.ndarray | None
    """uint8 [tokens], 1 for predicted tokens; None if all are."""
    bad: tuple[BadRecord, ...]
    """In reading order."""
    choices: np.ndarray | None = None
    """int32 [documents, 4]: `TokenDocument.choice`; None without choices."""
    firsts: np.ndarray | None = None
    """int32 [documents]: tokens of the preferred side of each pair; None without pairs."""
    columns: dict[str, np.ndarray] = field(factory=dict)
    """Numbers per token, float32 [tokens] each, by name."""
    values: dict[str, np.ndarray] = field(factory=dict)
    """Numbers of the documents, float32 [documents] each, by name."""
    lost: dict[str, int] = field(factory=dict)
    """Number of conversations with left-out content, by its kind."""


@frozen
class WorkerFailure:
    """Exception of a unit, sent by a worker."""

    error: BaseException
    trace: str


def encode_unit(source: "DataSource", encoder: "DocumentEncoder", unit: "SourceUnit", dtype: np.dtype) -> EncodedUnit:
    """Read a unit and tokenize its records, with one batch of them in memory at a time.

    Raises whatever reading and tokenizing raise, and DataError for ids beyond the vocabulary or too little memory.
    """
    try:
        return _encode(source, encoder, unit, dtype)
    except MemoryError as error:
        message = "not enough memory to read and tokenize this part of the data"
        raise DataError(
            message, path=unit.path, line=unit.line, remedy="Use fewer --jobs, or split the file."
        ) from error


def _encode(source: "DataSource", encoder: "DocumentEncoder", unit: "SourceUnit", dtype: np.dtype) -> EncodedUnit:
    tokens: list[np.ndarray] = []
    lengths: list[int] = []
    masks: list[np.ndarray | None] = []
    choices: list[tuple[int, int, int, int]] = []
    firsts: list[int] = []
    columns: dict[str, list[np.ndarray]] = {}
    values: dict[str, list[float]] = {}
    bad: list[BadRecord] = []
    lost: Counter[str] = Counter()
    for batch in _batches(source.read(unit)):
        documents = iter(encoder.encode([record for record in batch if not isinstance(record, BadRecord)]))
        # Bad records of reading and of encoding are kept in one order.
        results = [record if isinstance(record, BadRecord) else next(documents) for record in batch]
        good: list[TokenDocument] = [
            document
            for result in results
            if not isinstance(result, BadRecord)
            for document in (result if isinstance(result, tuple) else (result,))
        ]
        bad.extend(result for result in results if isinstance(result, BadRecord))
        if not good:
            continue
        ids = np.concatenate([document.ids for document in good])
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < encoder.vocab_size:
            wrong = int(ids.min()) if ids.min() < 0 else int(ids.max())
            message = f"token {wrong} is outside the vocabulary of {encoder.vocab_size:,}"
            raise DataError(message, path=unit.path, line=unit.line, remedy="Use the tokenizer that made the tokens.")
        tokens.append(ids.astype(dtype, copy=False))
        counts = [len(document.ids) for document in good]
        assert min(counts) > 0, "a document without tokens is a bad record"
        lengths += counts
        masks.append(_mask(good, counts))
        choices += [document.choice for document in good if document.choice is not None]
        firsts += [document.first for document in good if document.first is not None]
        for document in good:
            lost.update(document.lost)
            for name, column in document.columns.items():
                columns.setdefault(name, []).append(column)
            for name, value in document.values.items():
                values.setdefault(name, []).append(value)
    return EncodedUnit(
        tokens=np.concatenate(tokens) if tokens else np.empty(0, dtype),
        lengths=np.array(lengths, dtype=np.int64),
        trained=_joined(masks, tokens),
        bad=tuple(bad),
        choices=np.array(choices, dtype=np.int32) if choices else None,
        firsts=np.array(firsts, dtype=np.int32) if firsts else None,
        columns={name: np.concatenate(parts) for name, parts in columns.items()},
        values={name: np.array(numbers, dtype=np.float32) for name, numbers in values.items()},
        lost=dict(lost),
    )


def _batches(records: "Iterator[SourceRecord | BadRecord]") -> "Iterator[list[SourceRecord | BadRecord]]":
    batch: list[Any] = []
    characters = 0
    for record in records:
        batch.append(record)
        characters += 0 if isinstance(record, BadRecord) else record.size
        if len(batch) == BATCH_RECORDS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _mask(documents: "list[TokenDocument]", counts: list[int]) -> np.ndarray | None:
    if all(document.trained is None or document.trained.all() for document in documents):
        return None
    counted = zip(documents, counts, strict=True)
    parts = [np.ones(count, bool) if document.trained is None else document.trained for document, count in counted]
    return np.concatenate(parts).astype(np.uint8)


def _joined(masks: list[np.ndarray | None], tokens: list[np.ndarray]) -> np.ndarray | None:
    if all(mask is None for mask in masks):
        return None
    masked = zip(masks, tokens, strict=True)
    return np.concatenate([np.ones(len(ids), np.uint8) if mask is None else mask for mask, ids in masked])


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep the tokenizer from starting threads within the block: they would outlive it and slow every later fork."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def serve(fd: int) -> None:
    """Run a worker process: a source and an encoder come over the connection `fd`, then units.

    Each is answered with an EncodedUnit or a WorkerFailure, in order of arrival. The process ends with the connection.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the building process decides what Ctrl-C means
    connection = Connection(fd)
    try:
        try:
            source, encoder, dtype = connection.recv()
        except (EOFError, ConnectionError):
            raise
        except Exception as error:  # any exception of unpickling
            connection.send(_failure(error))
            return
        connection.send(None)  # from here on, a death is due to a unit
        units: queue.Queue[SourceUnit] = queue.Queue(1)
        # Units are received while one is worked on: neither end ever waits for the other to write.
        threading.Thread(target=_receive, args=(connection, units), daemon=True).start()
        while True:
            connection.send(_answer(source, encoder, units.get(), dtype))
    except (EOFError, ConnectionError):
        os._exit(0)  # the receiver is gone


def _receive(connection: Connection, units: "queue.Queue[SourceUnit]") -> None:
    try:
        while True:
            units.put(connection.recv())
    except (EOFError, ConnectionError):
        os._exit(0)  # at once: the building process is gone, so the result is useless


def _answer(
    source: "DataSource", encoder: "DocumentEncoder", unit: "SourceUnit", dtype: np.dtype
) -> EncodedUnit | WorkerFailure:
    try:
        return encode_unit(source, encoder, unit, dtype)
    except Exception as error:
        return _failure(error)


def _failure(error: Exception) -> WorkerFailure:
    return WorkerFailure(_sendable(error), traceback.format_exc())


def _sendable(error: Exception) -> Exception:
    """Return the error itself if it can be pickled, else one with its name and text."""
    try:
        copy = pickle.loads(pickle.dumps(error))
        return error if str(copy) == str(error) else RuntimeError(f"{type(error).__name__}: {error}")
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


# Below this input size, starting processes costs more than it saves.
SMALL = 8 << 20
# Units at a worker: one is tokenized, one waits.
AT_WORKER = 2
# Limits of units that are read, worked on or waiting: WINDOW per worker, and WINDOW_BYTES per worker unless it is a
# single unit. This bounds the memory of the process that reads and writes.
WINDOW = 4
WINDOW_BYTES = 32 << 20
DEATHS = 3


def encoded_units(
    source: "DataSource", encoder: "DocumentEncoder", units: "Iterable[SourceUnit]", dtype: np.dtype, jobs: int | None
) -> "Generator[tuple[SourceUnit, EncodedUnit]]":
    """Yield each unit with its documents, in the order of `units`, whatever `jobs` is.

    `jobs` processes work; 1: only this one; None: one per core, unless there is little to do. Raises what a unit raises
    when its turn comes, and DataError for a unit at which three workers died.
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
    """Yield the units, then the exception of getting the next one, to be raised in turn."""
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
    """Unanswered units, oldest first; it works on the first."""
    ready: bool = False


class Pool:
    """`jobs` worker processes, each a new interpreter, so that no state of this process's threads is copied."""

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
        """Yield each unit with its documents, in order. A WorkerFailure is raised at its turn; raises as
        `encoded_units`."""
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
            worker = min(self._workers, key=lambda candidate: len(candidate.slots))
            if len(worker.slots) == AT_WORKER:
                return
            slot = self._todo.popleft()
            worker.slots.append(slot)
            try:
                worker.connection.send(slot.unit)
            except OSError:
                self._replace(worker)

    def _listen(self) -> None:
        """Wait for answers, and give their workers more units."""
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
        """Replace a worker that died; its units are repeated, except one at which the third worker died."""
        worker.connection.close()
        worker.process.kill()  # it may only have closed its connection
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
            serve = f"from xtrain.runtime.feed.tokenizing.workers import serve; serve({theirs.fileno()})"
            # Not multiprocessing's own start: that would run the main module again, which in a rank imports torch.
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", f"import sys; sys.path[:] = {sys.path!r}; {serve}"],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # output of libraries must not mix with this process's output
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"},
            )
        return _Worker(process, ours)

    def _send_job(self, worker: _Worker) -> None:
        try:
            worker.connection.send_bytes(self._setup)
        except OSError:
            self._replace(worker)


def _raised(failure: WorkerFailure) -> BaseException:
    """Return the error of a worker with its traceback as a note."""
    if failure.trace:
        failure.error.add_note(failure.trace)
    return failure.error


def _bytes(unit: "SourceUnit | WorkerFailure") -> int:
    """Return the memory of a unit: for a packed file more than on disk."""
    if isinstance(unit, WorkerFailure):
        return 0
    return max(unit.size, len(unit.part)) if isinstance(unit.part, bytes) else unit.size


def _death(unit: "SourceUnit", how: str) -> DataError:
    return DataError(
        f"the process that tokenized this part of the data was {how}, {DEATHS} times",
        path=unit.path,
        line=unit.line,
        remedy="Signal 9 usually means too little memory: use fewer --jobs, or look for a huge record here.",
    )
