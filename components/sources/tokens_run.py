"""Reader of already tokenized documents."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
from attrs import frozen

from xtrain.runtime.base.data_errors import DataError
from xtrain.runtime.feed.records import BadRecord, SourceRecord, SourceUnit, TokenIds, Unusable
from xtrain.runtime.feed.sources.files import matched, size_of
from xtrain.runtime.feed.sources.source import OpenedSource, SourceRequest
from xtrain.runtime.feed.sources.token_files import TokenArray, files_of, is_store, open_tokens

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
