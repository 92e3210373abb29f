"""Reader of already tokenized documents.

Files are .npy, raw numbers, shards with a header, indexed pairs of files, and token stores, all mapped as arrays.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from xtrain.components.sources.tokens import STORE_FILES
from xtrain.lazy_attrs import frozen
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.digests import Stamp
from xtrain.runtime.feed.records import BadRecord, SourceRecord, SourceUnit, TokenIds, Unusable
from xtrain.runtime.feed.sources.files import matched, size_of, unreadable
from xtrain.runtime.feed.sources.source import OpenedSource, SourceRequest

DEFAULT_DTYPE = "uint16"
# Numbers to check in a file that does not declare its type.
_LOOKED_AT = 1 << 16
# Shards of nanogpt and llm.c begin with 256 int32: a magic number, a version, the number of tokens.
_SHARD_HEADER = 1024
_SHARD_DTYPES = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
# Index of Megatron's indexed datasets: magic, version (uint64), code of the dtype (uint8), numbers of sequences and of
# document ends (uint64 each); then lengths (int32) and byte offsets (int64) of sequences, and the first sequence of
# each document (int64), one more than there are documents.
_INDEX_MAGIC = b"MMIDIDX\x00\x00"
_INDEX_HEADER = 34
_INDEX_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


@frozen(kw_only=True, eq=False)
class TokenArray:
    """The tokens of a file, mapped."""

    tokens: np.ndarray
    """Integers [tokens]."""
    offsets: np.ndarray | None = None
    """int64 [documents + 1] if the file has bounds of documents; otherwise separators mark them."""
    trained: np.ndarray | None = None
    """uint8 [tokens], 1 for predicted tokens. None: all."""


def open_tokens(path: Path, dtype: str | None) -> TokenArray:
    """Map a file, or the folder of a token store. dtype: type of the numbers; None: the file's own, else uint16.

    Raises DataError if it cannot be read, is damaged, has no integers, or other ones than `dtype`.
    """
    try:
        stamps = tuple(map(Stamp.of, files_of(path)))
    except OSError as error:
        raise unreadable(path, error) from error
    return _opened(path, dtype, stamps)


@lru_cache(maxsize=16)
def _opened(path: Path, dtype: str | None, stamps: tuple[Stamp, ...]) -> TokenArray:
    del stamps  # a changed file is opened again
    try:
        if path.is_dir():
            return _store(path)
        if not size_of(path):
            return TokenArray(tokens=np.empty(0, np.uint16))
        if path.suffix == ".npy":
            return _numpy(path, dtype)
        if (index := path.with_suffix(".idx")).is_file():
            return _indexed(path, index, dtype)
        return _bare(path, dtype)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


def is_store(path: Path) -> bool:
    """Return True if a folder looks like a token store."""
    return all((path / name).is_file() for name in STORE_FILES)


def files_of(path: Path) -> tuple[Path, ...]:
    """Return the files that `open_tokens` reads at `path` and that identify its content."""
    if path.is_dir():
        return tuple(file for name in ("tokens.bin", "offsets.npy", "trained.bin") if (file := path / name).is_file())
    index = path.with_suffix(".idx")
    return (path, index) if path.suffix == ".bin" and index.is_file() else (path,)


def _store(path: Path) -> TokenArray:
    from xtrain.runtime.feed.token_store import open_store

    store = open_store(path)
    if store is None:
        raise DataError("not an intact token store", path=path, remedy="Build it again.")
    if not store.is_plain:
        message = "a token store of pairs, or with further numbers, cannot be read as token ids"
        raise DataError(message, path=path, remedy="Read the records that it was made of.")
    return TokenArray(tokens=store.tokens, offsets=store.offsets, trained=store.trained)


def _numpy(path: Path, dtype: str | None) -> TokenArray:
    tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        shape = " × ".join(map(str, tokens.shape)) or "a single"
        raise DataError(f"{shape} {tokens.dtype}, not a list of integers", path=path, remedy="Save one flat array.")
    _agree(path, tokens.dtype, dtype)
    return TokenArray(tokens=np.asarray(tokens))


def _bare(path: Path, dtype: str | None) -> TokenArray:
    size = size_of(path)
    if size >= _SHARD_HEADER:
        head = np.fromfile(path, dtype="<i4", count=3)
        kind = _SHARD_DTYPES.get((int(head[0]), int(head[1])))
        if kind is not None:
            count, known = int(head[2]), np.dtype(kind)
            if _SHARD_HEADER + count * known.itemsize != size:
                there = (size - _SHARD_HEADER) / known.itemsize
                message = f"its header says {count:,} tokens, but it has {there:,.10g}"
                raise DataError(message, path=path, remedy="Download or write it again.")
            _agree(path, known, dtype)
            return TokenArray(tokens=_mapped(path, known, _SHARD_HEADER))
    kind = np.dtype(dtype or DEFAULT_DTYPE)
    if size % kind.itemsize:
        message = f"{size:,} bytes are not a whole number of {kind.name} values"
        raise DataError(message, path=path, remedy="Set `dtype` to what was written, or download it again.")
    tokens = _mapped(path, kind, 0)
    # Such a file does not declare its type; small numbers of twice the width have empty halves.
    if dtype is None and len(tokens) >= 8 and not tokens[1:_LOOKED_AT:2].any():
        message = f"every second number is 0, read as {kind.name}: it seems to hold a wider type"
        raise DataError(message, path=path, remedy="Set `dtype` to what was written, such as uint32.")
    return TokenArray(tokens=tokens)


def _indexed(path: Path, index: Path, dtype: str | None) -> TokenArray:
    data = np.fromfile(index, dtype=np.uint8)
    head = data[:_INDEX_HEADER].tobytes()
    if len(head) < _INDEX_HEADER or not head.startswith(_INDEX_MAGIC):
        raise DataError(
            "not an index of an indexed dataset", path=index, remedy=f"Remove it if {path.name} needs no index."
        )
    version, code = int.from_bytes(head[9:17], "little"), head[17]
    sequences, ends = int.from_bytes(head[18:26], "little"), int.from_bytes(head[26:34], "little")
    if version != 1 or code not in _INDEX_DTYPES:
        raise DataError(f"version {version}, dtype {code} of the index are not supported", path=index)
    parts, at = [], _INDEX_HEADER
    for kind, count in (("<i4", sequences), ("<i8", sequences), ("<i8", ends)):
        size = np.dtype(kind).itemsize * count
        parts.append(data[at : at + size])
        at += size
        if len(parts[-1]) != size:
            raise DataError("the index ends too early", path=index, remedy="Download or write it again.")
    lengths, pointers, documents = (part.view(kind) for part, kind in zip(parts, ("<i4", "<i8", "<i8"), strict=True))
    known = np.dtype(_INDEX_DTYPES[code])
    _agree(path, known, dtype)
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    intact = (
        bool(np.array_equal(pointers, offsets[:-1] * known.itemsize))
        and size_of(path) == int(offsets[-1]) * known.itemsize
        and (ends == 0 or (documents[0] == 0 and documents[-1] == sequences and bool(np.all(np.diff(documents) >= 0))))
        and (ends > 0 or sequences == 0)
    )
    if not intact:
        message = f"does not fit its index {index.name}"
        raise DataError(message, path=path, remedy="Download or write both again.")
    document_offsets = offsets[documents] if ends else np.zeros(1, np.int64)
    return TokenArray(tokens=_mapped(path, known, 0), offsets=document_offsets)


def _agree(path: Path, stored: np.dtype, asked: str | None) -> None:
    if asked is not None and np.dtype(asked) != stored:
        message = f"holds {stored.name}, and `dtype` says {asked}"
        raise DataError(message, path=path, remedy="Leave `dtype` out: the file says what it holds.")


def _mapped(path: Path, dtype: np.dtype, offset: int) -> np.ndarray:
    if size_of(path) == offset:
        return np.empty(0, dtype)
    return np.asarray(np.memmap(path, dtype=dtype.newbyteorder("<"), mode="r", offset=offset))


UNIT_TOKENS = 1 << 20


def open_source(request: SourceRequest) -> OpenedSource:
    """Return the matching files and their document separator. Raises DataError for a pattern without matches, and for a
    separator that is not a token."""
    files = matched(request.patterns, request.base, folder=is_store)
    # The index of a file pair is read with its data file.
    units = tuple(dict.fromkeys(path.with_suffix(".bin") if path.suffix == ".idx" else path for path in files))
    separator, tokenizer = request.options["separator"], request.tokenizer
    if separator is None:
        if tokenizer is None:
            raise DataError("source `tokens` needs a separator, or a tokenizer that has one")
        separator = tokenizer.eos
    elif tokenizer is not None and not 0 <= separator < tokenizer.vocab_size:
        message = f"separator {separator} is not a token: the vocabulary has {tokenizer.vocab_size:,}"
        raise DataError(message, remedy="Set `separator` to the id that ends documents in these files.")
    return OpenedSource(
        reader=TokenFiles(files=units, dtype=request.options["dtype"], separator=separator),
        files=tuple(file for path in units for file in files_of(path)),
        options={**request.options, "separator": separator},
    )


@frozen(kw_only=True)
class TokenFiles:
    """Files of token ids, cut into documents after each separator or at the file's own boundaries.

    A separator is the last token of its document; a separator with no tokens before it belongs to no document. Tokens
    after the last separator of a file are a document too, and so is a whole file without separators. Nothing is added:
    the first token of a document, bos or not, is never predicted; all others are, the separator included.
    """

    files: tuple[Path, ...]
    dtype: str | None
    separator: int

    def units(self) -> Iterator[SourceUnit]:
        """Yield ranges of tokens that end at document ends. Raises DataError for unreadable files."""
        for path in self.files:
            array = open_tokens(path, self.dtype)
            if not len(array.tokens):
                reason = Unusable("no documents: a file without tokens")
                yield SourceUnit(size=_size(path), part=reason, path=path)
                continue
            item = array.tokens.itemsize
            rest = _size(path) - len(array.tokens) * item
            for start, stop in _ranges(array, self.separator):
                yield SourceUnit(size=(stop - start) * item + rest, part=(start, stop), path=path)
                rest = 0

    def read(self, unit: SourceUnit) -> Iterator[SourceRecord | BadRecord]:
        """Yield the documents of a range."""
        if isinstance(unit.part, Unusable):
            yield BadRecord(origin=str(unit.path), reason=unit.part.reason)
            return
        assert unit.path is not None
        start, stop = unit.part
        array = open_tokens(unit.path, self.dtype)
        bounds = _bounds(array, self.separator, start, stop)
        for first, end in pairwise(bounds):
            ids = array.tokens[first:end]
            if array.offsets is None and len(ids) == 1 and ids[0] == self.separator:
                continue
            origin = f"{unit.path}, token {first}"
            if len(ids) < 2:
                yield BadRecord(origin=origin, reason="a document of a single token has nothing to predict")
                continue
            trained = None if array.trained is None else array.trained[first:end].astype(bool)
            yield SourceRecord(TokenIds(ids=ids, trained=trained), origin)

    def num_bytes(self) -> int:
        """Return the bytes of all files."""
        return sum(map(_size, self.files))


def _size(path: Path) -> int:
    return sum(map(size_of, files_of(path)))


def _ranges(array: TokenArray, separator: int) -> Iterator[tuple[int, int]]:
    tokens, start = array.tokens, 0
    while start < len(tokens):
        seen, stop = start, min(start + UNIT_TOKENS, len(tokens))
        while stop < len(tokens):
            ends = _ends(array, separator, seen, stop)
            if len(ends):
                stop = int(ends[-1])
                break
            seen, stop = stop, min(stop + UNIT_TOKENS, len(tokens))  # a longer document
        yield start, stop
        start = stop


def _bounds(array: TokenArray, separator: int, start: int, stop: int) -> list[int]:
    return np.unique([start, *_ends(array, separator, start, stop), stop]).tolist()


def _ends(array: TokenArray, separator: int, start: int, stop: int) -> np.ndarray:
    """Return the document ends between two positions: the positions after their last tokens, ascending."""
    if array.offsets is not None:
        first, last = np.searchsorted(array.offsets, [start, stop], side="right")
        return array.offsets[first:last]
    return np.flatnonzero(array.tokens[start:stop] == separator) + start + 1
