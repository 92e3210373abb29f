"""A dataset ready to be read: tokenised, split into training and hold-out, both packed into rows. Without torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import field, frozen

from xtrain.dsl.schema.packings import packing_of
from xtrain.dsl.schema.sources import SOURCES
from xtrain.planner.plan import Node, Plan
from xtrain.runtime.data.documents.encoder import DocumentEncoder
from xtrain.runtime.data.documents.tokenizers import TextTokenizer
from xtrain.runtime.data.packing.pack import pack_rows
from xtrain.runtime.data.packing.pairs import pack_pairs
from xtrain.runtime.data.packing.row_reader import RowReader
from xtrain.runtime.data.packing.rows import Oversized, Rows
from xtrain.runtime.data.packing.rows_cache import cached_rows, num_rows, rows_key
from xtrain.runtime.data.packing.split import cached_split
from xtrain.runtime.data.sources.source import DataSource, open_source
from xtrain.runtime.data.stores.progress import Report
from xtrain.runtime.data.stores.store import TokenStore, open_named
from xtrain.runtime.data.tokenising.build import build_store

PARTS: tuple[str, ...] = ("training", "hold-out")


@frozen(kw_only=True, eq=False)
class PreparedDataset:
    """A tokenised dataset, its documents dealt to training and hold-out, both packed into rows."""

    name: str
    store: TokenStore
    train_documents: np.ndarray
    heldout_documents: np.ndarray
    train_rows: Rows
    heldout_rows: Rows
    reference: Mapping[str, str] = field(factory=dict)
    """Of the column of a reference model that the run has added to the store: `reference`, as the plan names it, and
    `weights`, what these are known by; empty where there is none."""

    @property
    def parts(self) -> dict[str, RowReader]:
        """`training` and `hold-out`, to be read row by row."""
        documents = (self.train_documents, self.heldout_documents)
        rows = (self.train_rows, self.heldout_rows)
        return {
            part: RowReader(store=self.store, documents=own, rows=packed)
            for part, own, packed in zip(PARTS, documents, rows, strict=True)
        }


def prepare(
    store: TokenStore,
    *,
    dataset: str,
    cache: Path,
    holdout: float,
    seed: int,
    sequence: int,
    oversized: Oversized,
    align: int = 1,
    method: str | None = None,
    group: int = 1,
) -> PreparedDataset:
    """Split off the hold-out and pack both parts, or open what was packed before, in `cache`.

    Raises DataError as `cached_split`, `pack_rows` and `cached_rows` do.
    """
    documents = dict(zip(PARTS, cached_split(store, cache, holdout, seed), strict=True))
    settings = {"holdout": holdout, "seed": seed, "sequence": sequence, "oversized": oversized}
    settings |= {"align": align, "method": method, "group": group}

    def packed(part: str) -> Rows:
        def pack() -> Rows:
            if store.firsts is not None:
                return pack_pairs(store, documents[part], sequence, oversized, align, method=method, group=group)
            lengths = store.lengths_of(documents[part])
            return pack_rows(lengths, sequence, oversized, align, method=method, group=group)

        return cached_rows(cache / _rows_name(store.folder, part, settings), pack)

    return PreparedDataset(
        name=dataset,
        store=store,
        train_documents=documents["training"],
        heldout_documents=documents["hold-out"],
        train_rows=packed("training"),
        heldout_rows=packed("hold-out"),
    )


def _rows_name(store: str, part: str, args: Mapping[str, Any]) -> str:
    """What the folder of packed rows is called, from the folder of their store and the arguments of `setup.data`."""
    settings = {"capacity": args["sequence"], "align": args.get("align", 1), "oversized": args["oversized"]}
    settings |= packing_of(args.get("method")).names_rows(args.get("group", 1))
    return rows_key(store=store, holdout=args["holdout"], seed=args["seed"], part=part, **settings)


def rows_there(plan: Plan, node: Node, names: Sequence[str]) -> int | None:
    """How many training rows of the dataset of a `setup.data` node are packed in the cache, from a store that is called
    by one of the `names`; None if none are. Nothing but that is read."""
    for name in names:
        folder = cache_of(plan) / "rows" / _rows_name(name, "training", node.args)
        if (count := num_rows(folder)) is not None:
            return count
    return None


def source_of(plan: Plan, node: Node, tokenizer: TextTokenizer) -> DataSource:
    """Where the dataset of a `setup.data` node comes from; nothing is read yet.

    Raises DataError as `open_source` does.
    """
    args = node.args
    source = SOURCES.of_kind(args["kind"])
    # The user's own code lies beside the spec; files are where the command is given.
    beside = source is not None and source.beside_spec
    base = Path(plan.spec).absolute().parent if beside else Path.cwd()
    return open_source(
        args["kind"],
        patterns=tuple(args["patterns"]),
        options=args["options"],
        reads=args["reads"],
        base=base,
        bad_record_limit=args["bad_records"],
        tokenizer=tokenizer,
    )


def prepared_from(
    plan: Plan, node: Node, tokenizer: TextTokenizer, *, jobs: int | None = None, progress: Report | None = None
) -> PreparedDataset:
    """The dataset of a `setup.data` node as a run reads it, tokenised and packed now if that is not in the cache.

    `jobs` and `progress` as `build_store` takes them. Raises DataError for whatever of the data cannot be used.
    """
    source = source_of(plan, node, tokenizer)
    encoder = DocumentEncoder(tokenizer, node.args["reads"])
    store = build_store(source, encoder, cache_of(plan) / "tokens", jobs=jobs, progress=progress)
    return packed_from(plan, node, store)


def opened_from(plan: Plan, node: Node, names: Sequence[str]) -> PreparedDataset | None:
    """The same from the store that is called by one of the `names` of the same data, its key first, if it is in the
    cache; the source is not looked at."""
    store = open_named(cache_of(plan) / "tokens", names)
    return None if store is None else packed_from(plan, node, store)


def cache_of(plan: Plan) -> Path:
    """Where what is made of data is kept."""
    return Path(plan.workspace["root"]) / "cache"


def packed_from(plan: Plan, node: Node, store: TokenStore) -> PreparedDataset:
    """The dataset of a `setup.data` node whose tokens are in `store`, packed now if that is not in the cache."""
    wanted = ("dataset", "holdout", "oversized", "seed", "sequence", "align", "method", "group")
    args: dict[str, Any] = {name: node.args[name] for name in wanted if name in node.args}
    return prepare(store, cache=cache_of(plan) / "rows", **args)
