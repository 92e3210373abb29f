"""Documents that a dataset leaves out: short ones, those that repeat or resemble an earlier one, and those that share
words with a benchmark. Without torch.

Documents are read one after the other. In memory are the hashes of `AT_ONCE` documents, and the n-grams of benchmarks.
"""

import json
import os
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from attrs import evolve, field, frozen

from xtrain.plan.canonical import DATA, digest
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.base.files import make_folder
from xtrain.runtime.feed.digests import FileDigests
from xtrain.runtime.feed.records import strings
from xtrain.runtime.feed.resemblance import PERMUTATIONS, WORDS, datasketch_version, resembling_documents
from xtrain.runtime.feed.token_store import TokenStore
from xtrain.runtime.feed.tokenizers import TextTokenizer
from xtrain.runtime.feed.words import words
from xtrain.text.units import plural

NGRAM: Final = 13
"""Words that a document and a benchmark share in contamination (GPT-3, arXiv 2005.14165, appendix C)."""
AT_ONCE: Final = 1 << 23
FORMAT: Final = 3
_FILES: Final = ("short.npy", "repeated.npy", "contaminated.npy")


@frozen(kw_only=True)
class LeftOut:
    """Documents of a store that a dataset leaves out, int64, ascending. short: they have fewer tokens than `least`.
    repeated: other ones that have all tokens and numbers of an earlier document, or resemble one if `similar`.
    contaminated: other ones that share `NGRAM` words with a record of a benchmark. key: names what they depend on."""

    short: np.ndarray
    repeated: np.ndarray
    contaminated: np.ndarray
    key: str = ""
    similar: bool = False
    least: int = 0

    @property
    def all(self) -> np.ndarray:
        """All of them, int64, ascending."""
        return np.sort(np.concatenate((self.short, self.repeated, self.contaminated)))

    def text(self, documents: int) -> str:
        """Say how many of the documents of a store are left out."""
        repeat = "resemble" if self.similar else "repeat"
        counts = [f"{len(self.short):,} have fewer than {plural(self.least, 'token')}"] if self.least else []
        counts += [f"{len(self.repeated):,} {repeat} an earlier one"]
        counts += [f"{len(self.contaminated):,} share {NGRAM} words with a benchmark"]
        return f"{len(self.all):,} of {plural(documents, 'document')} are left out: {', '.join(counts)}"


def cleaning_key(cache: Path, deduplicate: str | float, decontaminate: Sequence[str], least: int) -> str:
    """Return the name of what a dataset leaves out.

    cache: folder of cached data. least: tokens of a document. Raises DataError if a benchmark cannot be read.
    """
    digests = FileDigests(cache / "tokens" / "files.json")
    contents = [digests.digest(Path(path)) for path in decontaminate]
    method = [] if isinstance(deduplicate, str) else [datasketch_version(), PERMUTATIONS, WORDS]
    return digest([FORMAT, deduplicate, *method, NGRAM, contents, least], DATA, size=16)


def left_out(
    store: TokenStore,
    tokenizer: TextTokenizer,
    cache: Path,
    deduplicate: str | float,
    decontaminate: Sequence[str],
    least: int,
) -> LeftOut:
    """Return the documents that a dataset leaves out, found now unless they are in the cache.

    Raises DataError if a benchmark cannot be read, or the cache cannot be written.
    """
    key = cleaning_key(cache, deduplicate, decontaminate, least)
    folder = cache / "rows" / f"left-out-{digest([key, store.folder], DATA, size=16)}"
    if (known := _open(folder, key)) is None:
        repeated = np.empty(0, dtype=np.int64)
        if deduplicate == "exact":
            repeated = repeated_documents(store)
        elif not isinstance(deduplicate, str):
            repeated = _resembling(store, tokenizer, deduplicate, cache / "rows")
        texts = ((each, tokenizer.decode(store.document(each))) for each in range(store.num_documents))
        contaminated = _sharing(texts, decontaminate) if decontaminate else np.empty(0, dtype=np.int64)
        short = _whole_questions(store, np.flatnonzero(np.diff(store.offsets) < least))
        repeated = np.setdiff1d(repeated, short)
        contaminated = np.setdiff1d(_whole_questions(store, contaminated), np.union1d(short, repeated))
        found = LeftOut(short=short, repeated=repeated, contaminated=contaminated, key=key)
        try:
            make_folder(folder, lambda partial: _write(found, partial), lambda there: _open(there, key) is not None)
        except OSError as error:
            remedy = "Free some space or choose another cache folder."
            message = f"cannot write which documents are left out: {error}"
            raise DataError(message, path=folder, remedy=remedy) from error
        known = found
    return evolve(known, similar=not isinstance(deduplicate, str), least=least)


def _whole_questions(store: TokenStore, documents: np.ndarray) -> np.ndarray:
    """Return the documents, with all choices of their questions: no question loses one choice alone."""
    if store.choices is None:
        return documents
    questions = np.cumsum(store.choices[:, 0] == 0)
    return np.flatnonzero(np.isin(questions, questions[documents]))


def _open(folder: Path, key: str) -> LeftOut | None:
    try:
        parts = [np.load(folder / name, allow_pickle=False) for name in _FILES]
    except (OSError, ValueError, EOFError):
        return None
    return LeftOut(short=parts[0], repeated=parts[1], contaminated=parts[2], key=key)


def _write(found: LeftOut, folder: Path) -> None:
    for name, documents in zip(_FILES, (found.short, found.repeated, found.contaminated), strict=True):
        with (folder / name).open("wb") as file:
            np.save(file, documents, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())


def repeated_documents(store: TokenStore, at_once: int = AT_ONCE) -> np.ndarray:
    """Return the documents with all tokens and numbers of an earlier document, int64, ascending; of questions with
    choices, all choices of those that repeat an earlier question.

    Compares hashes of 128 bits. Reads the store once for each `at_once` documents, whose hashes take 24 bytes each.
    """
    parts = -(-store.num_documents // at_once)
    firsts = range(store.num_documents) if store.choices is None else np.flatnonzero(store.choices[:, 0] == 0).tolist()
    found = [np.empty(0, dtype=np.int64)]
    for part in range(parts):
        numbers, hashes = array("q"), bytearray()
        for place, (first, end) in enumerate(pairwise(chain(firsts, (store.num_documents,)))):
            name = _hash(store, first, end)
            if parts == 1 or int.from_bytes(name[:4], "little") % parts == part:
                numbers.append(place)
                hashes += name
        pairs_N2 = np.frombuffer(hashes, dtype=np.uint64).reshape(-1, 2)
        order = np.lexsort((pairs_N2[:, 1], pairs_N2[:, 0]))  # stable: earlier documents first
        same = (pairs_N2[order[1:]] == pairs_N2[order[:-1]]).all(axis=1)
        found.append(np.frombuffer(numbers, dtype=np.int64)[order[1:][same]])
    repeated = np.sort(np.concatenate(found))
    if store.choices is None:
        return repeated
    return np.flatnonzero(np.isin(np.cumsum(store.choices[:, 0] == 0) - 1, repeated))


def _resembling(store: TokenStore, tokenizer: TextTokenizer, similarity: float, folder: Path) -> np.ndarray:
    """Return the documents that resemble an earlier one; of questions with choices, all choices of a question."""
    every = np.arange(store.num_documents)
    firsts = every if store.choices is None else np.flatnonzero(store.choices[:, 0] == 0)
    texts = (
        " ".join(tokenizer.decode(store.document(document)) for document in range(first, end))
        for first, end in pairwise((*firsts.tolist(), store.num_documents))
    )
    try:
        found = resembling_documents(texts, len(firsts), similarity, folder)
    except OSError as error:
        remedy = "Free some space or choose another cache folder."
        raise DataError(f"cannot write what documents are compared by: {error}", path=folder, remedy=remedy) from error
    return every[np.isin(np.searchsorted(firsts, every, side="right") - 1, found)]


def first_copies(store: TokenStore, documents: Sequence[int]) -> dict[int, int]:
    """Return document → the first document with all its tokens and numbers, for documents of no question. Reads the
    store up to the last of them."""
    hashes = {document: _hash(store, document, document + 1) for document in documents}
    wanted, firsts = {*hashes.values()}, dict[bytes, int]()
    for document in range(max(documents, default=-1) + 1):
        if (name := _hash(store, document, document + 1)) in wanted:
            firsts.setdefault(name, document)
    return {document: firsts[name] for document, name in hashes.items()}


def _hash(store: TokenStore, begin: int, until: int) -> bytes:
    """Return a hash of the documents `begin` up to `until`."""
    first, end = store.offsets[begin], store.offsets[until]
    hashed = blake2b(np.diff(store.offsets[begin : until + 1]).tobytes(), digest_size=16)
    hashed.update(np.ascontiguousarray(store.tokens[first:end]).tobytes())
    of_tokens = [array for array in (store.trained, *store.columns.values()) if array is not None]
    of_document = [array for array in (store.choices, store.firsts, *store.values.values()) if array is not None]
    for numbers in (*(each[first:end] for each in of_tokens), *(each[begin:until] for each in of_document)):
        hashed.update(np.ascontiguousarray(numbers).tobytes())
    return hashed.digest()


def _sharing(texts: Iterator[tuple[int, str]], files: Sequence[str]) -> np.ndarray:
    """Return the documents that share an n-gram with a record of the files, int64, ascending."""
    grams_of_all: set[int] = set()
    for file in files:
        grams_of_all |= Benchmark.read(Path(file), NGRAM, None).records.keys()
    found = [number for number, text in texts if not grams_of_all.isdisjoint(grams(text, NGRAM))]
    return np.array(found, dtype=np.int64)


# Words of benchmarks --------------------------------------------------------------------------------------------------


def grams(text: str, size: int) -> Iterator[int]:
    """Yield a 64-bit hash of each n-gram of words of a text."""
    parts = words(text)
    for first in range(len(parts) - size + 1):
        gram = " ".join(parts[first : first + size])
        yield int.from_bytes(blake2b(gram.encode(), digest_size=8).digest(), "little")


@frozen(kw_only=True)
class Benchmark:
    """N-grams of the records of a file of JSON lines. records: hash of an n-gram → the lines that have it. sizes: line
    → its number of different n-grams; too_short: lines without one."""

    size: int
    records: Mapping[int, tuple[int, ...]]
    sizes: Mapping[int, int]
    too_short: tuple[int, ...] = field(default=())

    @classmethod
    def read(cls, path: Path, size: int, name: str | None) -> "Benchmark":
        """Read the texts of each line; name: only those below this key. Raises DataError for an unreadable or
        empty file."""
        found: dict[int, list[int]] = defaultdict(list)
        sizes: dict[int, int] = {}
        short: list[int] = []
        try:
            with path.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, start=1):
                    if not line.strip():
                        continue
                    own = {gram for text in _texts(json.loads(line), name, path, number) for gram in grams(text, size)}
                    for gram in own:
                        found[gram].append(number)
                    sizes[number] = len(own)
                    short += [] if own else [number]
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror}", path=path) from None
        except ValueError as error:
            raise DataError(f"it is not a file of JSON lines: {error}", path=path) from None
        if not sizes:
            raise DataError("it has no records; a benchmark has a JSON value on each line", path=path)
        return cls(
            size=size,
            records={gram: tuple(numbers) for gram, numbers in found.items()},
            sizes=sizes,
            too_short=tuple(short),
        )

    def shared(self, text: str) -> Counter[int]:
        """Return line → the number of its n-grams that a text has."""
        counts: Counter[int] = Counter()
        for gram in set(grams(text, self.size)):
            counts.update(self.records.get(gram, ()))
        return counts


def _texts(record: Any, name: str | None, path: Path, number: int) -> list[str]:
    if name is None:
        return [*strings(list(record.values()) if isinstance(record, dict) else record)]
    if not isinstance(record, dict) or name not in record:
        raise DataError(f"the record has no field `{name}`", path=path, line=number)
    return [*strings(record[name])]
