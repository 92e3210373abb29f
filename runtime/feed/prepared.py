"""Prepared datasets: tokenized, split into training and hold-out documents, both packed into rows. Without torch.

`build_store` opens the token store of a dataset or builds it; its name is a digest of everything that it depends on.
`counted_rows` counts the rows of a plan's datasets if they are in the cache already, without tokenizing or packing.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from attrs import field, frozen

from xtrain.dsl.schema.data_components import SOURCES, packing_of
from xtrain.plan.canonical import DATA, digest
from xtrain.plan.plan import Counted, Node, Plan
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.digests import FileDigests, remembering
from xtrain.runtime.feed.documents import DocumentEncoder
from xtrain.runtime.feed.packing.rows import Oversized, Rows, pack_pairs, pack_rows
from xtrain.runtime.feed.packing.stored_rows import RowReader, cached_rows, cached_split, num_rows, rows_key
from xtrain.runtime.feed.sources.source import DataSource, open_source
from xtrain.runtime.feed.token_store import FORMAT, DataProgress, Report, TokenStore, open_named, open_store
from xtrain.runtime.feed.tokenizers import TextTokenizer, load_tokenizer
from xtrain.runtime.feed.tokenizing.tokenize import TokeniseJob, make_store

if TYPE_CHECKING:
    from xtrain.runtime.feed.cleaning import LeftOut

INDEX = "files.json"
"""Index of file digests, next to the stores."""


@frozen(kw_only=True)
class StoreIdentity:
    """Everything that a token store depends on, and its names."""

    covers: dict[str, Any] = field()
    """JSON values; a change of one changes the key."""
    contents: tuple[str, ...] = ()
    """Earlier forms of `content` in `covers` for the same data."""

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
    """Return the identity of a source's and encoder's store; reads each file once, and again after a change.

    The limit on bad records is not part of it: it decides whether a store may be used, not its content. Raises
    DataError if a file cannot be read.
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
            # Digest of the files, and of the source's options that affect its content.
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
    """Open the store under `cache/<key>/`, or under another name of the same data; build it if it is missing or
    damaged.

    `jobs` processes tokenize (None: one per core, unless there is little to do; 1: this process alone). Any number of
    processes may call this at once: one builds, the others wait, and take over if it ends early. An unfinished build is
    resumed. An exception of `progress` ends only this call. Any thread may call it. `identity` saves reading the files
    again.

    Raises DataError for bad records beyond the source's limit, a source without documents, files that change meanwhile,
    or a cache that cannot be written; and whatever a user's source raises.
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
                meta={"files": source.num_files, "covers": identity.covers},
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
    """A tokenized dataset, split into training and hold-out documents, both packed into rows."""

    name: str
    store: TokenStore
    train_documents: np.ndarray
    heldout_documents: np.ndarray
    train_rows: Rows
    heldout_rows: Rows
    left_out: "LeftOut | None" = None
    """Documents in neither part; None if the settings leave out none."""
    reference: Mapping[str, str] = field(factory=dict)
    """Identity of a reference model's column that the run added to the store: `reference`, as the plan names it, and
    `weights`, their digests; empty without one."""

    @property
    def parts(self) -> dict[str, RowReader]:
        """Readers of the rows of `training` and `hold-out`."""
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
    without: Sequence[int] = (),
    left_out: "LeftOut | None" = None,
) -> PreparedDataset:
    """Split off the hold-out and pack both parts, or open them from `cache`.

    left_out: documents in neither part. without: documents of the store whose tokens are removed from the packed
    training rows. Raises DataError as `cached_split`, `pack_rows` and `cached_rows` do, and for a document that does
    not exist.
    """
    if without and max(without) >= store.num_documents:
        raise DataError(
            f"dataset {dataset} has {store.num_documents:,} documents, and `without` names number {max(without):,}",
            remedy="Numbers start at 0; `xtrain data show` prints them.",
        )
    gone, key = (None, "") if left_out is None else (left_out.all, left_out.key)
    split = cached_split(store, cache, holdout, seed, gone, key)
    documents = dict(zip(PARTS, split, strict=True))
    settings = {"holdout": holdout, "seed": seed, "sequence": sequence, "oversized": oversized}
    settings |= {"align": align, "method": method, "group": group}

    def packed(part: str) -> Rows:
        def pack() -> Rows:
            if store.firsts is not None:
                return pack_pairs(store, documents[part], sequence, oversized, align, method=method, group=group)
            lengths = store.lengths_of(documents[part])
            return pack_rows(lengths, sequence, oversized, align, method=method, group=group)

        return cached_rows(cache / _rows_name(store.folder, part, settings, key), pack)

    train_rows = packed("training")
    if without:
        packed_rows = RowReader(store=store, documents=documents["training"], rows=train_rows)
        train_rows = packed_rows.without(np.asarray(without, dtype=np.int64))
    return PreparedDataset(
        name=dataset,
        store=store,
        train_documents=documents["training"],
        heldout_documents=documents["hold-out"],
        train_rows=train_rows,
        heldout_rows=packed("hold-out"),
        left_out=left_out,
    )


def _rows_name(store: str, part: str, args: Mapping[str, Any], left_out: str) -> str:
    """Return the folder name of packed rows, from their store's folder and the arguments of `setup.data`. left_out: key
    of the documents that are left out."""
    settings = {"capacity": args["sequence"], "align": args.get("align", 1), "oversized": args["oversized"]}
    settings |= packing_of(args.get("method")).names_rows(args.get("group", 1))
    settings |= {"left_out": left_out} if left_out else {}
    return rows_key(store=store, holdout=args["holdout"], seed=args["seed"], part=part, **settings)


def rows_there(plan: Plan, node: Node, names: Sequence[str]) -> int | None:
    """Return the number of packed training rows of a `setup.data` node in the cache, for a store with one of the
    `names`; None without any. Reads nothing else."""
    left_out = ""
    if cleaning := _cleaning(node):
        from xtrain.runtime.feed.cleaning import cleaning_key

        left_out = cleaning_key(cache_of(plan), *cleaning)
    for name in names:
        folder = cache_of(plan) / "rows" / _rows_name(name, "training", node.args, left_out)
        if (count := num_rows(folder)) is not None:
            return count
    return None


def _cleaning(node: Node) -> tuple[str | float, Sequence[str], int] | None:
    """Return `deduplicate`, `decontaminate` and `min_tokens` of a dataset; None if it leaves out no document."""
    args = node.args
    found = (args.get("deduplicate", "none"), args.get("decontaminate", ()), args.get("min_tokens", 0))
    return None if found == ("none", (), 0) else found


def source_of(plan: Plan, node: Node, tokenizer: TextTokenizer) -> DataSource:
    """Return the source of a `setup.data` node's dataset, without reading data.

    Raises DataError as `open_source` does, and if a file of `decontaminate` or the package of `deduplicate` is missing.
    """
    args = node.args
    if not isinstance(args.get("deduplicate", ""), str):
        from xtrain.runtime.feed.resemblance import datasketch

        datasketch()
    for file in args.get("decontaminate", ()):
        if not Path(file).is_file():
            remedy = "Paths of `decontaminate` are relative to the working folder."
            raise DataError("is not a file, and `decontaminate` names it", path=Path(file), remedy=remedy)
    source = SOURCES.of_kind(args["kind"])
    # The user's own code is next to the spec; other files are relative to the working folder.
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
        objects=cache_of(plan) / "objects",
    )


def prepared_from(
    plan: Plan, node: Node, tokenizer: TextTokenizer, *, jobs: int | None = None, progress: Report | None = None
) -> PreparedDataset:
    """Return the dataset of a `setup.data` node, tokenized and packed now if it is not in the cache.

    jobs, progress: as in `build_store`. Raises DataError for unusable data.
    """
    source = source_of(plan, node, tokenizer)
    encoder = DocumentEncoder(tokenizer, node.args["reads"])
    store = build_store(source, encoder, cache_of(plan) / "tokens", jobs=jobs, progress=progress)
    return packed_from(plan, node, store, tokenizer)


def opened_from(plan: Plan, node: Node, names: Sequence[str]) -> PreparedDataset | None:
    """Return the dataset from a cached store with one of the `names` of the same data, its key first, without reading
    the source; None if there is none."""
    store = open_named(cache_of(plan) / "tokens", names)
    return None if store is None else packed_from(plan, node, store)


def cache_of(plan: Plan) -> Path:
    """Return the folder of cached data."""
    return Path(plan.workspace["root"]) / "cache"


def packed_from(plan: Plan, node: Node, store: TokenStore, tokenizer: TextTokenizer | None = None) -> PreparedDataset:
    """Return the dataset of a `setup.data` node from its tokens in `store`, packed now if its rows are not in the
    cache."""
    cleaned = None
    if cleaning := _cleaning(node):
        from xtrain.runtime.feed.cleaning import left_out

        tokenizer = tokenizer or load_tokenizer(plan.node("setup.tokenizer").args["source"], Path.cwd())
        cleaned = left_out(store, tokenizer, cache_of(plan), *cleaning)
    wanted = ("dataset", "holdout", "oversized", "seed", "sequence", "align", "method", "group", "without")
    args: dict[str, Any] = {name: node.args[name] for name in wanted if name in node.args}
    return prepare(store, cache=cache_of(plan) / "rows", left_out=cleaned, **args)


# Largest number of bytes to read, to hash files without a remembered digest: takes a moment.
MOST_READ: Final = 1 << 26


def counted_rows(plan: Plan) -> Counted | None:
    """Return the number of training rows of every dataset of a plan; None unless all are packed in the cache.

    Faults of the data give None as well: they are reported when the data is read.
    """
    cache = cache_of(plan) / "tokens"
    if not cache.is_dir():
        return None
    rows, stores = {}, {}
    try:
        tokenizer = load_tokenizer(plan.node("setup.tokenizer").args["source"], Path.cwd())
        for name in plan.node("setup.loader").args["datasets"]:
            counted = _rows(plan, plan.node(f"setup.data.{name}"), tokenizer, cache)
            if counted is None:
                return None
            rows[name], stores[name] = counted
    except DataError:
        return None
    return Counted(rows=rows, stores=stores) if all(rows.values()) else None


def _rows(plan: Plan, node: Node, tokenizer: TextTokenizer, cache: Path) -> tuple[int, str] | None:
    """Return (rows, key of the store) of a dataset."""
    source = source_of(plan, node, tokenizer)
    # Data from elsewhere would have to be fetched first.
    if source.fetched is not None:
        return None
    if FileDigests(cache / INDEX).unread_bytes(source.files) > MOST_READ:
        return None
    identity = identify(source, DocumentEncoder(tokenizer, node.args["reads"]), cache)
    count = rows_there(plan, node, identity.names)
    return None if count is None else (count, identity.key)
