"""Turns units of a source into arrays of tokens: in this process, or in one that does nothing else."""

import os
import pickle
import queue
import signal
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import field, frozen

from xtrain.runtime.data.errors import DataError
from xtrain.runtime.data.records.bad_records import BadRecord

if TYPE_CHECKING:
    from xtrain.runtime.data.documents.encoder import DocumentEncoder, TokenDocument
    from xtrain.runtime.data.records.records import SourceRecord
    from xtrain.runtime.data.sources.source import DataSource, SourceUnit

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
    """uint8 [tokens], 1 where a token is predicted; None if all are."""
    bad: tuple[BadRecord, ...]
    """In reading order."""
    choices: np.ndarray | None = None
    """int32 [documents, 4]: what `TokenDocument.choice` says; None if they are no choices."""
    firsts: np.ndarray | None = None
    """int32 [documents]: tokens of the preferred side of each pair; None if they are no pairs."""
    columns: dict[str, np.ndarray] = field(factory=dict)
    """Numbers along the tokens, float32 [tokens] each, by name."""
    values: dict[str, np.ndarray] = field(factory=dict)
    """Numbers of the documents, float32 [documents] each, by name."""
    lost: dict[str, int] = field(factory=dict)
    """Conversations of which the template has left something out, by the kind of that."""


@frozen
class WorkerFailure:
    """What a unit raised, on its way out of a worker."""

    error: BaseException
    trace: str


def encode_unit(source: "DataSource", encoder: "DocumentEncoder", unit: "SourceUnit", dtype: np.dtype) -> EncodedUnit:
    """Read a unit and tokenise its records, one batch of them in memory at a time.

    Raises whatever reading and tokenising raise, and DataError for ids beyond the vocabulary or too little memory.
    """
    try:
        return _encode(source, encoder, unit, dtype)
    except MemoryError as error:
        message = "not enough memory to read and tokenise this part of the data"
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
        # Records that cannot be read and documents that cannot be encoded are told in one order.
        found = [record if isinstance(record, BadRecord) else next(documents) for record in batch]
        good: list[TokenDocument] = [
            document
            for each in found
            if not isinstance(each, BadRecord)
            for document in (each if isinstance(each, tuple) else (each,))
        ]
        bad.extend(each for each in found if isinstance(each, BadRecord))
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
    each = zip(documents, counts, strict=True)
    parts = [np.ones(count, bool) if document.trained is None else document.trained for document, count in each]
    return np.concatenate(parts).astype(np.uint8)


def _joined(masks: list[np.ndarray | None], tokens: list[np.ndarray]) -> np.ndarray | None:
    if all(mask is None for mask in masks):
        return None
    each = zip(masks, tokens, strict=True)
    return np.concatenate([np.ones(len(ids), np.uint8) if mask is None else mask for mask, ids in each])


@contextmanager
def one_thread() -> Iterator[None]:
    """No threads of the tokenizer within the block: they would outlive it, and burden every later fork."""
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
    """The life of a worker process: a source and an encoder come over the connection `fd`, then units.

    Each is answered with an EncodedUnit or a Failure, in the order in which they came. It ends with the connection.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that builds decides what Ctrl-C means
    connection = Connection(fd)
    try:
        try:
            source, encoder, dtype = connection.recv()
        except (EOFError, ConnectionError):
            raise
        except Exception as error:  # anything that is raised where they are unpacked
            connection.send(_failure(error))
            return
        connection.send(None)  # from here on, a death is due to a unit
        units: queue.Queue[SourceUnit] = queue.Queue(1)
        # Units are taken off the connection while one is worked on: neither end ever waits for the other to write.
        threading.Thread(target=_receive, args=(connection, units), daemon=True).start()
        while True:
            connection.send(_answer(source, encoder, units.get(), dtype))
    except (EOFError, ConnectionError):
        os._exit(0)  # nobody waits for the answer


def _receive(connection: Connection, units: "queue.Queue[SourceUnit]") -> None:
    try:
        while True:
            units.put(connection.recv())
    except (EOFError, ConnectionError):
        os._exit(0)  # at once: the process that builds is gone, and what is being tokenised is of no use


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
    """The error itself if it survives the way, else one that tells its name and words."""
    try:
        copy = pickle.loads(pickle.dumps(error))
        return error if str(copy) == str(error) else RuntimeError(f"{type(error).__name__}: {error}")
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
