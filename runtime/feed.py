"""`setup.tokenizer`, `setup.data`, `collate.*`, `setup.loader`: the data half of a run, node by node."""

import math
from pathlib import Path
from typing import get_args

import torch.distributed as dist
from attrs import define

from ..planner.plan import Plan
from .data import collators
from .data.collators import Chain
from .data.loader import EvalLoader, RowLoader
from .data.order import RowOrder
from .data.packing import Method
from .data.prepared import PreparedDataset, prepare
from .data.rows import Oversized
from .data.sources import open_source
from .data.store import TokenStore, build_store, open_store
from .data.tokenizers import Tokenizer, load_tokenizer
from .ops import op
from .records import Records
from .state import Rank


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
    method: Method = "sequential",
    group: int = 1,
) -> dict[str, PreparedDataset]:
    """Tokenise, split off the hold-out, pack both parts into rows of `sequence` positions: once, then cached.

    Documents take a multiple of `align` positions in a row; `group` of them are packed together unless they are packed
    in their order.
    """
    source = open_source(
        kind, patterns=tuple(patterns), text_field=text_field, base=Path.cwd(), bad_record_limit=bad_records
    )
    cache = Path(plan.workspace["root"]) / "cache"

    def packed(store: TokenStore) -> PreparedDataset:
        return prepare(
            store, dataset=dataset, cache=cache / "rows", holdout=holdout, seed=seed, sequence=sequence,
            oversized=oversized, align=align, method=method, group=group,
        )  # fmt: skip

    prepared = packed(build_store(source, tokenizer, cache / "tokens")) if rank.local_rank == 0 else None
    if rank.world_size > 1:
        dist.barrier()  # one rank of a machine builds, the others then open what it has built
        key = [prepared.store.key if prepared is not None else None]
        dist.broadcast_object_list(key, src=0)
        # Another machine's folder is not this one's: then its ranks build.
        if prepared is None:
            store = open_store(cache / "tokens" / str(key[0])) or build_store(source, tokenizer, cache / "tokens")
            prepared = packed(store)
    assert prepared is not None
    for bad in prepared.store.bad_records.first:
        records.event("warning", step=0, message=f"dataset {dataset}: {bad.origin}: {bad.reason}")
    for part, rows in (("training", prepared.train_rows), ("hold-out", prepared.heldout_rows)):
        if rows.num_truncated or rows.num_skipped:
            message = (
                f"dataset {dataset}, {part}: {rows.num_truncated:,} documents cut, {rows.num_skipped:,} left out, "
                f"{rows.num_dropped_positions:,} tokens in all, as oversized = {oversized} says"
            )
            records.event("warning", step=0, message=message)
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
def pack(
    stages: list[collators.Stage], method: Method, capacity: int, align: int = 1, group: int = 1
) -> list[collators.Stage]:
    """Lay samples side by side. Which of them share a row, as `method` and `group` say, `setup.data` has worked out."""
    assert method in get_args(Method) and group >= 1
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
    balance: bool = False,
) -> Feed:
    """The rows of every step, dealt to data ranks, by what attention costs in them if `balance` says so.

    With a budget in epochs the steps are known from here on.
    """
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
        balance=balance,
    )
    assert loader.rows_per_step == rows and prepared.train_rows.capacity == sequence
    loader.make_ready()
    if prepared.train_rows.num_rows < rows:
        message = (
            f"dataset {dataset} has {prepared.train_rows.num_rows:,} rows, and a step takes {rows:,}: it repeats some"
        )
        records.event("warning", step=0, message=message)
    if steps is None:
        assert epochs is not None
        steps = math.ceil(epochs * prepared.train_rows.num_rows / rows)
    return Feed(loader=loader, collate=collate, micro=micro, steps=steps, datasets=datasets)
