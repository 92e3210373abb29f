"""Documents of a token store by their record or their text. Without torch.

All searches read documents one after the other. In memory are the names of bad records.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

from attrs import frozen

from xtrain.plan.plan import Plan
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.dataset_view import data_nodes
from xtrain.runtime.feed.prepared import PreparedDataset, cache_of, source_of
from xtrain.runtime.feed.records import BadRecord
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
def _resolved(path: str, folder: str) -> str:
    return str(Path(folder, path).resolve())


def place_of(origin: str) -> tuple[str, str]:
    """Split the origin of a record into its file, with links resolved, and its line; empty without one."""
    path, colon, line = origin.rpartition(":")
    here = str(Path.cwd())  # commands on several runs enter the folder of each
    return (_resolved(path, here), line) if colon and line.isdecimal() else (_resolved(origin, here), "")


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
            f"no dataset of this run has a record at `{wanted}`",
            remedy="Give FILE:LINE, with lines counted from 1; FILE, for all its records; DATASET:DOCUMENT or "
            "DATASET#ROW, with numbers as in `xtrain data show`.",
        )
    return dict(found)


def origins_of(dataset: SearchedDataset, documents: set[int]) -> dict[int, str]:
    """Return the origin of each of some documents, below the working folder as a relative path."""
    here = f"{Path.cwd()}/"
    return {document: origin.removeprefix(here) for document, origin in dataset.origins() if document in documents}
