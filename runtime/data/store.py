"""The tokenised data set: one flat array of tokens, cached on disk under the hash of everything it depends on."""

import json
from hashlib import blake2b
from pathlib import Path

import numpy as np
from attrs import define

from .bad_records import BadRecord, BadRecordReport
from .cache_folder import ATTEMPTS, make_folder
from .errors import DataError
from .sources import Source
from .store_writer import write_store
from .tokenizers import Tokenizer

# Part of every key: raise it whenever the same source and tokenizer would give other files.
FORMAT = 1
_AT_ONCE = 1 << 16


@define(kw_only=True, frozen=True, eq=False)
class TokenStore:
    """Documents as tokens, each laid out `bos, text…, eos`, one after the other in `tokens`."""

    key: str
    tokens: np.ndarray
    """uint16 or uint32 [tokens], mapped from disk and read-only."""
    offsets: np.ndarray
    """int64 [documents + 1]: document i is tokens[offsets[i] : offsets[i + 1]]."""
    num_files: int
    """How many files were read."""
    bad_records: BadRecordReport
    """What the source could not turn into documents when the store was built."""

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def lengths(self) -> np.ndarray:
        """Tokens of each document, bos and eos included, int64 [documents]."""
        return np.diff(self.offsets)

    def lengths_of(self, documents: np.ndarray) -> np.ndarray:
        """Tokens of some documents, bos and eos included, int64 [documents]; takes no more memory than the result."""
        lengths = np.empty(len(documents), dtype=np.int64)
        for first in range(0, len(documents), _AT_ONCE):
            some = documents[first : first + _AT_ONCE]
            np.subtract(self.offsets[some + 1], self.offsets[some], out=lengths[first : first + _AT_ONCE])
        return lengths

    def document(self, index: int) -> np.ndarray:
        """The tokens of one document, a view."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]


def store_key(source: Source, tokenizer: Tokenizer) -> str:
    """Hex name of the store that `source` and `tokenizer` give; reads every file of the source once.

    The limit on bad records is not in it: it decides whether a store may be used, not what is in it.
    """
    parts = [FORMAT, source.kind, source.text_field, source.fingerprint(), tokenizer.fingerprint, tokenizer.vocab_size]
    return blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def build_store(source: Source, tokenizer: Tokenizer, cache: Path) -> TokenStore:
    """Open the store under `cache/<key>/`, building it first if it is missing or damaged.

    Any number of processes may call this at once: each builds in a folder of its own and the first rename wins.
    Raises DataError for bad records beyond the source's limit, for a source without documents, or if the cache
    cannot be written.
    """
    key = store_key(source, tokenizer)
    final = cache / key
    for _ in range(ATTEMPTS):
        store = open_store(final)
        if store is not None:
            store.bad_records.check(source.bad_record_limit)
            return store
        try:
            make_folder(
                final,
                lambda partial: write_store(source, tokenizer, partial, format_version=FORMAT),
                lambda folder: open_store(folder) is not None,
            )
        except OSError as error:
            raise DataError(
                f"cannot write the token store: {error}", path=final, remedy="Free space or choose another cache."
            ) from error
    raise DataError("the token store is damaged as soon as it is written", path=final, remedy="Check this file system.")


def open_store(directory: Path) -> TokenStore | None:
    """The store in `directory`, or None if any part of it is missing, unreadable or of the wrong size."""
    try:
        meta = json.loads((directory / "meta.json").read_bytes())
        offsets = np.load(directory / "offsets.npy", allow_pickle=False)
        # A plain array over the mapping: slicing a memmap object costs several times as much.
        tokens = np.asarray(np.memmap(directory / "tokens.bin", dtype=np.dtype(meta["dtype"]), mode="r"))
        sound = (
            meta["format"] == FORMAT
            and offsets.shape == (meta["documents"] + 1,)
            and offsets.dtype == np.int64
            and offsets[0] == 0
            # bos and eos: no document is shorter than two tokens.
            and bool(np.all(np.diff(offsets) >= 2))
            and len(tokens) == meta["tokens"] == offsets[-1]
        )
        first = tuple(BadRecord(origin=origin, reason=reason) for origin, reason in meta["bad_records"]["first"])
        report = BadRecordReport(count=meta["bad_records"]["count"], first=first)
        files = int(meta["files"])
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None
    if not sound:
        return None
    return TokenStore(key=directory.name, tokens=tokens, offsets=offsets, num_files=files, bad_records=report)
