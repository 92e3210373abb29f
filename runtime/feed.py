"""`setup.tokenizer`, `setup.data`, `collate.*`, `setup.loader`: the data half of a run, node by node."""

import math
from pathlib import Path

import numpy as np
import torch.distributed as dist
from attrs import define, frozen

from ..planner.plan import Plan
from .data import collators
from .data.collators import Chain
from .data.loader import EvalLoader, RowLoader
from .data.order import RowOrder
from .data.packing import pack_sequential
from .data.rows import Oversized, Rows
from .data.sources import open_source
from .data.split import split_holdout
from .data.store import TokenStore, build_store, open_store
from .data.tokenizers import Tokenizer, load_tokenizer
from .ops import op
from .records import Records
from .state import Rank


@frozen(kw_only=True, eq=False)
class PreparedDataset:
    """A tokenised dataset, its documents dealt to training and hold-out, both packed into rows."""

    name: str
    store: TokenStore
    train_documents: np.ndarray
    heldout_documents: np.ndarray
    train_rows: Rows
    heldout_rows: Rows


@define
class Feed:
    """What the loop reads: the training loader, how many steps it is good for, and what evaluation needs."""

    loader: RowLoader
    collate: Chain
    micro: int
    steps: int
    datasets: dict[str, PreparedDataset]

    def evaluation(self, dataset: str, max_rows: int | None, rank: Rank) -> EvalLoader:
        prepared = self.datasets[dataset]
        return EvalLoader(
            store=prepared.store,
            documents=prepared.heldout_documents,
            rows=prepared.heldout_rows,
            collate=self.collate,
            micro=self.micro,
            data_rank=rank.data_rank,
            data_ranks=rank.data_ranks,
            max_rows=max_rows,
        )


@op("setup.tokenizer", gives="tokenizer")
def open_tokenizer(source: str) -> Tokenizer:
    """`bytes`, or a folder relative to the working folder."""
    return load_tokenizer(source, Path.cwd())


@op("setup.data", gives="datasets")
def prepare_dataset(
    plan: Plan,
    rank: Rank,
    tokenizer: Tokenizer,
    records: Records,
    datasets: dict[str, PreparedDataset],
    dataset: str,
    kind: str,
    patterns: list[str],
    text_field: str,
    holdout: float,
    oversized: Oversized,
    bad_records: int,
    seed: int,
    sequence: int,
    align: int = 1,
) -> dict[str, PreparedDataset]:
    """Tokenise (once, then cached), split off the hold-out, pack both parts into rows of `sequence` positions.

    Documents take a multiple of `align` positions in a row.
    """
    source = open_source(
        kind, patterns=tuple(patterns), text_field=text_field, base=Path.cwd(), bad_record_limit=bad_records
    )
    cache = Path(plan.workspace["root"]) / "cache" / "tokens"
    store = build_store(source, tokenizer, cache) if rank.local_rank == 0 else None
    if rank.world_size > 1:
        dist.barrier()  # one rank of a machine builds, the others then open what it has built
        key = [store.key if store is not None else None]
        dist.broadcast_object_list(key, src=0)
        store = store or open_store(cache / str(key[0]))
    if store is None:
        store = build_store(source, tokenizer, cache)  # another machine's folder is not this one's
    for bad in store.bad_records.first:
        records.event("warning", step=0, message=f"dataset {dataset}: {bad.origin}: {bad.reason}")
    train, heldout = split_holdout(store.offsets, holdout, seed)
    lengths = store.lengths()
    parts = {"training": train, "hold-out": heldout}
    rows = {part: pack_sequential(lengths[documents], sequence, oversized, align) for part, documents in parts.items()}
    for part, packed in rows.items():
        if packed.num_truncated or packed.num_skipped:
            message = (
                f"dataset {dataset}, {part}: {packed.num_truncated:,} documents cut, {packed.num_skipped:,} left out, "
                f"{packed.num_dropped_positions:,} tokens in all, as oversized = {oversized} says"
            )
            records.event("warning", step=0, message=message)
    prepared = PreparedDataset(
        name=dataset,
        store=store,
        train_documents=train,
        heldout_documents=heldout,
        train_rows=rows["training"],
        heldout_rows=rows["hold-out"],
    )
    return {**datasets, dataset: prepared}


@op("collate.to_tensor", gives="stages")
def to_tensor(stages: list[collators.Stage]) -> list[collators.Stage]:
    return [*stages, collators.to_tensor()]


@op("collate.flatten", gives="stages")
def flatten(stages: list[collators.Stage]) -> list[collators.Stage]:
    return [*stages, collators.flatten()]


@op("collate.shift_tokens", gives="stages")
def shift_tokens(stages: list[collators.Stage]) -> list[collators.Stage]:
    return [*stages, collators.shift_tokens()]


@op("collate.pack", gives="stages")
def pack(stages: list[collators.Stage], method: str, capacity: int, align: int = 1) -> list[collators.Stage]:
    assert method == "sequential"
    return [*stages, collators.pack(capacity=capacity, align=align)]


@op("collate.shard", gives="stages")
def shard(stages: list[collators.Stage], rank: Rank, ring: int, ulysses: int) -> list[collators.Stage]:
    """Keep this rank's positions of every row: zigzag over the ring, then contiguous over ulysses."""
    at = rank.coordinates
    part = collators.shard(ring=ring, ulysses=ulysses, ring_rank=at["ring"], ulysses_rank=at["ulysses"])
    return [*stages, part]


@op("collate.microbatches", gives="collate")
def microbatches(stages: list[collators.Stage], micro: int, accumulate: int) -> Chain:
    """The chain as one function; the loader deals `micro` rows to it `accumulate` times a step."""
    assert micro > 0 and accumulate > 0
    return collators.compose(stages)


@op("setup.loader", gives="feed")
def build_loader(
    rank: Rank,
    records: Records,
    datasets: dict[str, PreparedDataset],
    collate: Chain,
    dataset: str,
    micro: int,
    accumulate: int,
    rows: int,
    sequence: int,
    seed: int,
    steps: int | None,
    epochs: float | None,
) -> Feed:
    """The rows of every step, dealt to data ranks. With a budget in epochs the steps are known from here on."""
    prepared = datasets[dataset]
    loader = RowLoader(
        store=prepared.store,
        documents=prepared.train_documents,
        rows=prepared.train_rows,
        order=RowOrder(num_rows=prepared.train_rows.num_rows, seed=seed),
        collate=collate,
        micro=micro,
        accumulate=accumulate,
        data_rank=rank.data_rank,
        data_ranks=rank.data_ranks,
    )
    assert loader.rows_per_step == rows and prepared.train_rows.capacity == sequence
    if prepared.train_rows.num_rows < rows:
        message = (
            f"dataset {dataset} has {prepared.train_rows.num_rows:,} rows, and a step takes {rows:,}: it repeats some"
        )
        records.event("warning", step=0, message=message)
    if steps is None:
        assert epochs is not None
        steps = math.ceil(epochs * prepared.train_rows.num_rows / rows)
    return Feed(loader=loader, collate=collate, micro=micro, steps=steps, datasets=datasets)
