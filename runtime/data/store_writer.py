"""Writes the three files of a token store, holding one batch of documents in memory at a time."""

import json
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

from .bad_records import BadRecordLog
from .errors import DataError
from .sources import Document, Source
from .tokenizers import Tokenizer

BATCH_DOCUMENTS = 1024
BATCH_CHARACTERS = 1 << 22


def write_store(source: Source, tokenizer: Tokenizer, directory: Path, *, format_version: int) -> None:
    """Write `tokens.bin`, `offsets.npy` and, last, `meta.json` into the existing `directory`.

    Raises DataError for a source without documents, or bad records beyond its limit.
    """
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    log = BadRecordLog(limit=source.bad_record_limit)
    lengths = array("q")
    with (directory / "tokens.bin").open("wb") as file:
        for batch in _batches(source.documents(log)):
            ids = tokenizer.encode_batch([document.text for document in batch])
            file.write(_lay_out(ids, tokenizer, dtype).data)
            lengths.extend(len(document) + 2 for document in ids)
        _to_disk(file)
    if not lengths:
        raise DataError(
            f"source `{source.kind}` has no documents: {len(source.files)} files, {log.report.count} bad records",
            path=source.files[0],
        )
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(np.frombuffer(lengths, dtype=np.int64), out=offsets[1:])
    with (directory / "offsets.npy").open("wb") as file:
        np.save(file, offsets, allow_pickle=False)
        _to_disk(file)
    meta = {
        "format": format_version,
        "dtype": dtype.name,
        "documents": len(lengths),
        "tokens": int(offsets[-1]),
        "files": len(source.files),
        "source": source.kind,
        "tokenizer": tokenizer.name,
        "bad_records": {
            "count": log.report.count,
            "first": [[record.origin, record.reason] for record in log.report.first],
        },
    }
    with (directory / "meta.json").open("wb") as file:
        file.write(json.dumps(meta, indent=1).encode())
        _to_disk(file)


def _lay_out(ids: list[np.ndarray], tokenizer: Tokenizer, dtype: np.dtype) -> np.ndarray:
    out = np.empty(sum(map(len, ids)) + 2 * len(ids), dtype=dtype)
    at = 0
    for document in ids:
        end = at + len(document) + 1
        out[at] = tokenizer.bos
        out[at + 1 : end] = document
        out[end] = tokenizer.eos
        at = end + 1
    return out


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if len(batch) == BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _to_disk(file: IO[bytes]) -> None:
    # The rename must not reach the disk before the bytes it stands for.
    file.flush()
    os.fsync(file.fileno())
