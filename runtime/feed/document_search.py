"""Documents of a token store by their record, their text, or n-grams that they share with a benchmark. Without torch.

All searches read documents one after the other. In memory are the names of bad records and the n-grams of a benchmark.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from attrs import field, frozen

from xtrain.plan.plan import Plan
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.dataset_view import data_nodes
from xtrain.runtime.feed.prepared import PreparedDataset, cache_of, source_of
from xtrain.runtime.feed.records import BadRecord, strings
from xtrain.runtime.feed.token_store import BAD, TokenStore
from xtrain.runtime.feed.tokenizers import TextTokenizer


@frozen(kw_only=True, eq=False)
class SearchedDataset:
    """Dataset of a run whose documents are searched."""

    name: str
    plan: Plan
    data: PreparedDataset
    tokenizer: TextTokenizer

    @property
    def store(self) -> TokenStore:
        return self.data.store

    @property
    def left_out(self) -> dict[str, str]:
        """Origin of each bad record → why it has no document."""
        path = cache_of(self.plan) / "tokens" / self.store.folder / BAD
        if not path.is_file():
            return {}
        with path.open(encoding="utf-8", errors="surrogateescape") as lines:
            return {record["origin"]: record["reason"] for record in map(json.loads, lines)}

    def origins(self) -> Iterator[tuple[int, str]]:
        """Yield each document with the origin of its record: `path`, `path:line`, or words. Reads the source.

        Raises DataError if the source has other records than the store.
        """
        source = source_of(self.plan, data_nodes(self.plan)[self.name], self.tokenizer)
        left_out, document = self.left_out, 0
        for unit in source.units():
            for record in source.read(unit):
                if not isinstance(record, BadRecord) and record.origin not in left_out:
                    yield document, record.origin
                    document += 1
        if document != self.store.num_documents:
            raise DataError(
                f"dataset {self.name} has {document:,} records now, and {self.store.num_documents:,} documents when "
                "it was tokenized",
                remedy="Restore the files that the run was trained on.",
            )

    def texts(self) -> Iterator[tuple[int, str]]:
        """Yield each document with its text that rows have, without special tokens."""
        truncated = self.data.train_rows.num_truncated and self.store.firsts is None
        most = self.data.train_rows.capacity + 1 if truncated else None
        for document in range(self.store.num_documents):
            yield document, self.tokenizer.decode(self.store.document(document)[:most])

    def with_text(self, text: str) -> Iterator[int]:
        """Yield the documents whose text contains `text`."""
        return (document for document, whole in self.texts() if text in whole)


@lru_cache(maxsize=1 << 12)
def _resolved(path: str) -> str:
    return str(Path(path).resolve())


def place_of(origin: str) -> tuple[str, str]:
    """Split the origin of a record into its file, with links resolved, and its line; empty without one."""
    path, colon, line = origin.rpartition(":")
    return (_resolved(path), line) if colon and line.isdecimal() else (_resolved(origin), "")


def of_records(datasets: Iterable[SearchedDataset], wanted: str) -> dict[str, list[int]]:
    """Return dataset → the documents of the record `FILE:LINE`, or of `FILE` with all its lines. Raises DataError if
    there are none."""
    path, line = place_of(wanted)
    found: dict[str, list[int]] = defaultdict(list)
    for dataset in datasets:
        for origin, reason in dataset.left_out.items():
            if line and place_of(origin) == (path, line):
                raise DataError(f"{wanted} has no document: it is a bad record, {reason}")
        for document, origin in dataset.origins():
            file, number = place_of(origin)
            if file == path and line in ("", number):
                found[dataset.name].append(document)
    if not found:
        raise DataError(
            f"no dataset of this run has a record at {wanted}",
            remedy="Give FILE:LINE, with lines counted from 1; FILE, for all its records; DATASET:DOCUMENT or "
            "DATASET#ROW, with numbers as in `xtrain data show`.",
        )
    return dict(found)


def origins_of(dataset: SearchedDataset, documents: set[int]) -> dict[int, str]:
    """Return the origin of each of some documents, below the working folder as a relative path."""
    here = f"{Path.cwd()}/"
    return {document: origin.removeprefix(here) for document, origin in dataset.origins() if document in documents}


_WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation, as n-grams are compared (GPT-3, arXiv 2005.14165,
    appendix C)."""
    return _WORD.findall(text.lower())


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
        """Read the texts of each line; name: only those below this key. Raises DataError for an unreadable file."""
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
        except ValueError as error:
            raise DataError(f"{path} is not a file of JSON lines: {error}", path=path) from None
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
