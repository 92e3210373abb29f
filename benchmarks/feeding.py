"""Feeding: tokens per second from memory-mapped shards to model-ready batches, beside rows of Python lists.

    OMP_NUM_THREADS=1 python benchmarks/feeding.py

Documents of log-normal lengths, packed into rows of 8,192 by best fit; one thread, processor time, the least of several
turns that alternate. The other side is the way of the Hugging Face collators, restated: each document is a list of ids,
and a flattening collator strings ids, labels and positions together before they become tensors. Where the `datasets`
library is installed its rows take part too. Both sides give int64 ids, labels that never cross documents, positions
that start again with each document, and the bounds of documents. Prints a JSON line for each number of rows a call.
"""

import json
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from xtrain.runtime.data.bad_records import BadRecordReport
from xtrain.runtime.data.collators import compose, flatten, pack, shift_tokens, to_tensor
from xtrain.runtime.data.loader import RowLoader
from xtrain.runtime.data.order import RowOrder
from xtrain.runtime.data.packing import pack_rows
from xtrain.runtime.data.store import TokenStore

DOCUMENTS, CAPACITY, TURNS, STEPS = 100_000, 8192, 7, 400
SLOW_STEPS = 20


def shard(folder: Path) -> TokenStore:
    """Tokens in a file, mapped as a run maps them."""
    rng = np.random.default_rng(0)
    lengths = np.clip(np.rint(np.exp(rng.normal(np.log(350), 1.1, DOCUMENTS))), 16, CAPACITY).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    rng.integers(0, 60_000, offsets[-1]).astype(np.uint16).tofile(folder / "tokens.bin")
    tokens = np.asarray(np.memmap(folder / "tokens.bin", dtype=np.uint16, mode="r"))
    return TokenStore(key="shard", tokens=tokens, offsets=offsets, num_files=1, bad_records=BadRecordReport())


def loader(store: TokenStore, capacity: int, micro: int) -> RowLoader:
    documents = np.arange(store.num_documents)
    rows = pack_rows(store.lengths_of(documents), capacity, "split", method="multipack", group=100_000)
    return RowLoader(
        store=store,
        documents=documents,
        rows=rows,
        order=RowOrder(rows.num_rows, 0),
        collate=compose([to_tensor(), flatten(), shift_tokens(), pack(capacity=capacity)]),
        micro=micro,
        accumulate=1,
        data_rank=0,
        data_ranks=1,
    )


def flattened(documents: list[list[int]]) -> dict[str, torch.Tensor]:
    """What a flattening collator makes of rows: one long row, labels of the first tokens masked, positions anew."""
    ids: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    bounds = [0]
    for document in documents:
        ids += document
        labels += [-100, *document[1:]]
        positions += list(range(len(document)))
        bounds.append(len(ids))
    return {
        "input_ids": torch.tensor([ids], dtype=torch.int64),
        "labels": torch.tensor([labels], dtype=torch.int64),
        "position_ids": torch.tensor([positions], dtype=torch.int64),
        "cu_seq_lens": torch.tensor(bounds, dtype=torch.int32),
    }


def rows_of_lists(feed: RowLoader) -> Callable[[int], object]:
    """Documents of the step's rows as lists, out of the same memory map."""
    return lambda step: flattened(
        [segment.tolist() for index in feed.row_indices(step).flatten().tolist() for segment in feed._feeder.row(index)]
    )


def rows_of_datasets(store: TokenStore, feed: RowLoader) -> Callable[[int], object]:
    """Documents of the step's rows through the `datasets` library. Raises ImportError if it is not installed."""
    from datasets import Dataset  # pyright: ignore[reportMissingImports]

    held = Dataset.from_dict({"input_ids": [store.document(index).tolist() for index in range(5_000)]})
    documents = [
        feed.rows.document[feed.rows.row_offsets[row] : feed.rows.row_offsets[row + 1]] % 5_000
        for row in range(min(1000, feed.rows.num_rows))
    ]

    def read(step: int) -> object:
        rows = [documents[(step * feed.micro + row) % len(documents)] for row in range(feed.micro)]
        return flattened([held[int(index)]["input_ids"] for row in rows for index in row])

    return read


def best(call: Callable[[int], object], steps: int, seconds: float) -> float:
    """The lesser of `seconds` and what a step takes now."""
    begin = time.thread_time()
    for step in range(steps):
        call(step)
    return min(seconds, (time.thread_time() - begin) / steps)


def measure(store: TokenStore, capacity: int, micro: int) -> dict[str, object]:
    feed = loader(store, capacity, micro)
    paths: dict[str, tuple[Callable[[int], object], int]] = {
        "rows": (feed.microbatches, STEPS),
        "stages": (
            lambda step: feed.collate([feed._feeder.row(row) for row in feed.row_indices(step)[0].tolist()]),
            50,
        ),
        "lists_and_flattening": (rows_of_lists(feed), SLOW_STEPS),
    }
    with suppress(ImportError):
        paths["datasets_and_flattening"] = (rows_of_datasets(store, feed), SLOW_STEPS)
    out, source = np.empty((3, micro * capacity), np.int64), store.tokens[: micro * capacity]

    def widen(_: int) -> None:
        for target in out:
            np.copyto(target, source)

    paths["widening_copy"] = (widen, STEPS)
    seconds = dict.fromkeys(paths, np.inf)
    for turn in range(TURNS + 1):
        for name, (call, steps) in paths.items():
            seconds[name] = best(call, steps, np.inf if turn == 0 else seconds[name])  # the first turn warms up
    tokens = micro * capacity
    return {
        "positions_a_row": capacity,
        "rows_a_call": micro,
        "million_tokens_per_second": {name: round(tokens / s / 1e6, 1) for name, s in seconds.items()},
        "milliseconds_a_step": {name: round(s * 1e3, 4) for name, s in seconds.items()},
        "times": {name: round(s / seconds["rows"], 1) for name, s in seconds.items() if name != "rows"},
    }


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        store = shard(Path(name))
        for capacity, micro in ((CAPACITY, 1), (CAPACITY, 8), (64, 4)):
            print(json.dumps(measure(store, capacity, micro)), flush=True)


if __name__ == "__main__":
    main()
