"""Prepared datasets: tokenized, split into training and hold-out documents, both packed into rows. Without torch.

`build_store` opens the token store of a dataset or builds it; its name is a digest of everything that it depends on.
`counted_rows` counts the rows of a plan's datasets if they are in the cache already, without tokenizing or packing.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from attrs import field, frozen

from xtrain.dsl.schema.data_components import SOURCES, packing_of
from xtrain.plan.canonical import DATA, digest
from xtrain.plan.plan import Counted, Node, Plan
from xtrain.runtime.base.data_errors import DataError
from xtrain.runtime.feed.digests import FileDigests, remembering
from xtrain.runtime.feed.documents import DocumentEncoder
from xtrain.runtime.feed.packing.rows import Oversized, Rows, pack_pairs, pack_rows
from xtrain.runtime.feed.packing.stored_rows import RowReader, cached_rows, cached_split, num_rows, rows_key
from xtrain.runtime.feed.sources.source import DataSource, open_source
from xtrain.runtime.feed.token_store import FORMAT, DataProgress, Report, TokenStore, open_named, open_store
from xtrain.runtime.feed.tokenizers import TextTokenizer, load_tokenizer
from xtrain.runtime.feed.tokenizing.tokenize import TokeniseJob, make_store

INDEX = "files.json"
"""Beside the stores: what is known of the content of files."""


@frozen(kw_only=True)
class StoreIdentity:
    """The name of a store, and everything it depends on."""

    covers: dict[str, Any] = field()
    """JSON values: where one of them is another, so is the key."""
    contents: tuple[str, ...] = ()
    """What else `content` in `covers` may have been for the same data."""

    @property
    def key(self) -> str:
        """Hex name of the store."""
        return _key(self.covers)

    @property
    def names(self) -> tuple[str, ...]:
        """The key, and other names that a store of the same data may have."""
        return (self.key, *(_key({**self.covers, "content": content}) for content in self.contents))


def _key(covers: dict[str, Any]) -> str:
    return digest(covers, DATA, size=16)


def identify(
    source: "DataSource", encoder: "DocumentEncoder", cache: Path, progress: Report | None = None
) -> StoreIdentity:
    """What the store of a source and an encoder depends on; reads each file once, and again when it has changed.

    The limit on bad records is not in it: it decides whether a store may be used, not what is in it.
    Raises DataError if a file cannot be read.
    """

    def report(done: int, total: int) -> None:
        if progress is not None:
            progress(DataProgress(stage="files", done=done, total=total))

    digests = FileDigests(cache / INDEX)
    with remembering(digests):
        digests.learn(source.files, report)
        content, *others = source.fingerprints()
    return StoreIdentity(
        covers={
            "code": f"format {FORMAT}",
            "source": source.kind,
            "fields": list(source.reads.fields),
            # Of the files, and of the options of the source as far as they decide what is read.
            "content": content,
            **encoder.covers,
        },
        contents=tuple(others),
    )


def build_store(
    source: "DataSource",
    encoder: "DocumentEncoder",
    cache: Path,
    *,
    jobs: int | None = None,
    progress: Report | None = None,
    identity: StoreIdentity | None = None,
) -> TokenStore:
    """Open the store under `cache/<key>/`, or under another name of the same data; if there is none, or it is damaged,
    it is built first.

    `jobs` processes tokenise (None: as many as there are cores, unless there is little to do; 1: this one alone). Any
    number of processes may call this at once: one builds, the others wait, and go on with the work if it ends before.
    An unfinished build is resumed. What `progress` raises ends this call and nothing else. It may be called in any
    thread. `identity` saves looking at the files again.
    Raises DataError for bad records beyond the source's limit, for a source without documents, for files that change
    meanwhile, or if the cache cannot be written; and whatever a user's own source raises.
    """
    identity = identity or identify(source, encoder, cache, progress)
    final = cache / identity.key
    store = open_named(cache, identity.names)
    if store is None:

        def check_unchanged() -> None:
            if identify(source, encoder, cache) != identity:
                remedy = "Wait until they are complete, and start again."
                raise DataError(
                    "files of this source have changed while they were read", path=source.base, remedy=remedy
                )

        make_store(
            TokeniseJob(
                final=final,
                source=source,
                encoder=encoder,
                dtype=np.dtype(np.uint16 if encoder.vocab_size <= 1 << 16 else np.uint32),
                meta={"files": len(source.files), "covers": identity.covers},
                is_intact=lambda folder: open_store(folder) is not None,
                check_unchanged=check_unchanged,
                jobs=jobs,
                report=progress,
            )
        )
        store = open_named(cache, identity.names)
    if store is None:
        raise DataError(
            "the token store was damaged while it was written", path=final, remedy="Check this file system."
        )
    store.bad_records.check(source.bad_record_limit)
    return store


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


# Of files whose content is not remembered, so much is read to know whether they are those of a store: in a moment.
MOST_READ: Final = 1 << 26


def counted_rows(plan: Plan) -> Counted | None:
    """The training rows of every dataset of a plan; None unless all of them are packed in the cache already.

    Where something is wrong with the data they are not counted: whoever reads it says so.
    """
    cache = cache_of(plan) / "tokens"
    if not cache.is_dir():
        return None
    rows, stores = {}, {}
    try:
        tokenizer = load_tokenizer(plan.node("setup.tokenizer").args["source"], Path.cwd())
        for name in plan.node("setup.loader").args["datasets"]:
            found = _rows(plan, plan.node(f"setup.data.{name}"), tokenizer, cache)
            if found is None:
                return None
            rows[name], stores[name] = found
    except DataError:
        return None
    return Counted(rows=rows, stores=stores) if all(rows.values()) else None


def _rows(plan: Plan, node: Node, tokenizer: TextTokenizer, cache: Path) -> tuple[int, str] | None:
    """(rows, key of the store) of a dataset."""
    source = source_of(plan, node, tokenizer)
    # What comes from elsewhere would be fetched to be known.
    if source.fetched is not None:
        return None
    if FileDigests(cache / INDEX).unread_bytes(source.files) > MOST_READ:
        return None
    identity = identify(source, DocumentEncoder(tokenizer, node.args["reads"]), cache)
    count = rows_there(plan, node, identity.names)
    return None if count is None else (count, identity.key)
