"""Feeding: tokens per second from memory-mapped shards to model-ready batches, beside Hugging Face rows.

    OMP_NUM_THREADS=1 python benchmarks/feeding.py             # tokens a second, both sides in turns
    OMP_NUM_THREADS=1 python benchmarks/feeding.py --waiting   # share of a step spent waiting, in two short runs

Documents of log-normal lengths, packed into rows of 8,192 by best fit. Ours: rows of one dataset, of one with a mask of
what is trained on, and of a mixture of three. The other side reads the same documents of the same rows: from an Arrow
file through the `datasets` library, a batch of them at once as a loader of torch does, or as lists out of our memory
map; and strings ids, labels and positions together the way a flattening collator does. Both sides give int64 ids,
labels that never cross documents, positions that start again with each document, and the bounds of documents.
One thread, processor time, the least of several turns that alternate. `widening_copy` is the limit: ids, labels and
positions copied from 16 to 64 bits into memory that is used again. Prints a JSON line for each number of rows a call.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from xtrain.components.collators.flatten_torch import flatten
from xtrain.components.collators.pack_torch import pack
from xtrain.components.collators.shift_tokens_torch import shift_tokens
from xtrain.components.collators.to_tensor_torch import to_tensor
from xtrain.plan.plan import PlanPhase
from xtrain.planner.load import plan_from_spec
from xtrain.runtime.feed.collate import compose
from xtrain.runtime.feed.curriculum import Curriculum, TrainingRows
from xtrain.runtime.feed.loader import RowLoader
from xtrain.runtime.feed.packing.rows import pack_rows
from xtrain.runtime.feed.packing.stored_rows import RowReader
from xtrain.runtime.feed.records import BadRecordReport
from xtrain.runtime.feed.token_store import TokenStore
from xtrain.runtime.loop.executor import Executor

DOCUMENTS, CAPACITY, TURNS, STEPS = 100_000, 8192, 7, 400
SLOW_STEPS = 20
Call = Callable[[int], object]

WAITING = """
experiment waiting {{ budget = {steps} steps }}
model qwen3 {{ dim = 128, layers = 4, heads = 2, kv_heads = 1, ffn = 384, tie_embeddings = true }}
tokenizer bytes
dataset made {{ source = synthetic(documents = 20k, length = 300, spread = 1.0), holdout = 1% }}
batch {{ sequence = 512, micro = 2, rows = 2, prefetch = {prefetch} }}
collate = to_tensor -> flatten -> shift_tokens -> pack(multipack)
optimizer adamw {{ lr = 1e-3 }}
every 1 step log
"""


def shard(folder: Path, name: str, documents: int, masked: bool = False) -> TokenStore:
    """Tokens in a file, mapped as a run maps them."""
    rng = np.random.default_rng(0)
    lengths = np.clip(np.rint(np.exp(rng.normal(np.log(350), 1.1, documents))), 16, CAPACITY).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    rng.integers(0, 60_000, offsets[-1]).astype(np.uint16).tofile(folder / f"{name}.bin")
    tokens = np.asarray(np.memmap(folder / f"{name}.bin", dtype=np.uint16, mode="r"))
    trained = None
    if masked:  # turns of some dozens of tokens, every other one trained on
        turns = np.repeat(np.arange(len(tokens) // 32 + 1) % 2, 32)[: len(tokens)]
        turns.astype(np.uint8).tofile(folder / f"{name}.trained.bin")
        trained = np.asarray(np.memmap(folder / f"{name}.trained.bin", dtype=np.uint8, mode="r"))
    report = BadRecordReport()
    return TokenStore(key=name, tokens=tokens, offsets=offsets, num_files=1, bad_records=report, trained=trained)


def loader(stores: list[TokenStore], capacity: int, micro: int) -> RowLoader:
    datasets = []
    for store in stores:
        documents = np.arange(store.num_documents)
        rows = pack_rows(store.lengths_of(documents), capacity, "split", method="multipack", group=100_000)
        datasets.append(TrainingRows.of(store.key, RowReader(store=store, documents=documents, rows=rows), seed=0))
    names = tuple(dataset.name for dataset in datasets)
    whole = PlanPhase(name="train", first=0, fraction=None, shares={name: 1 / len(names) for name in names})
    return RowLoader(
        datasets=tuple(datasets),
        curriculum=Curriculum(datasets=names, phases=(whole,), steps=1 << 20, rows_per_step=micro, seed=0),
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


def documents_of(feed: RowLoader, step: int) -> list[int]:
    rows, own = feed.datasets[0].reader.rows, feed.step_rows(step).rows.flatten()
    return np.concatenate([rows.document[rows.row_offsets[row] : rows.row_offsets[row + 1]] for row in own]).tolist()


def rows_of_lists(store: TokenStore, feed: RowLoader) -> Call:
    """Documents of the step's rows as lists, out of the same memory map."""
    return lambda step: flattened([store.document(index).tolist() for index in documents_of(feed, step)])


def rows_of_datasets(store: TokenStore, feed: RowLoader, folder: Path) -> Call:
    """Documents of the step's rows through the `datasets` library. Raises ImportError if it is not installed."""
    import pyarrow
    from datasets import Dataset, disable_progress_bars, load_from_disk

    disable_progress_bars()
    if not folder.exists():
        ids = pyarrow.ListArray.from_arrays(store.offsets.astype(np.int32), store.tokens.astype(np.int32))
        Dataset(pyarrow.table({"input_ids": ids})).save_to_disk(folder)
    dataset = load_from_disk(folder)

    def read(step: int) -> object:
        return flattened([row["input_ids"] for row in dataset.__getitems__(documents_of(feed, step))])

    return read


def best(call: Call, steps: int, seconds: float) -> float:
    """The lesser of `seconds` and what a step takes now."""
    begin = time.thread_time()
    for step in range(steps):
        call(step)
    return min(seconds, (time.thread_time() - begin) / steps)


def measure(folder: Path, stores: dict[str, list[TokenStore]], capacity: int, micro: int) -> dict[str, object]:
    feeds = {name: loader(some, capacity, micro) for name, some in stores.items()}
    paths: dict[str, tuple[Call, int]] = {name: (feed.microbatches, STEPS) for name, feed in feeds.items()}
    (store,), feed = stores["rows"], feeds["rows"]
    if capacity == CAPACITY:  # else documents are cut, which the other side does not do
        paths["lists"] = (rows_of_lists(store, feed), SLOW_STEPS)
        with suppress(ImportError):
            paths["hugging_face"] = (rows_of_datasets(store, feed, folder / "arrow"), SLOW_STEPS)
            same_content(feed, paths["hugging_face"][0])
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
        "times_rows": {name: round(s / seconds["rows"], 1) for name, s in seconds.items() if name != "rows"},
    }


def same_content(feed: RowLoader, other: Call) -> None:
    """Every document of ours has one token less: its last one is no input, as nothing follows it."""
    (ours,), theirs = feed.microbatches(0), other(0)
    assert isinstance(theirs, dict)
    first = theirs["position_ids"][0] == 0
    last = torch.cat([first[1:], torch.ones(1, dtype=torch.bool)])
    assert torch.equal(ours.input_ids_BS[ours.real_BS], theirs["input_ids"][0][~last])
    assert torch.equal(ours.labels_BS[ours.real_BS], theirs["labels"][0][~first])
    assert torch.equal(ours.positions_BS[ours.real_BS], theirs["position_ids"][0][~last])


def waiting(folder: Path, prefetch: int, steps: int) -> dict[str, object]:
    """A run on one rank; what its records say of its steps, but for the first ones."""
    (folder / "waiting.xtrain").write_text(WAITING.format(steps=steps, prefetch=prefetch))
    plan = plan_from_spec(folder / "waiting.xtrain").plan
    assert plan is not None
    executor = Executor(plan, folder / f"run{prefetch}", rank=0)
    executor._set_up(0.0)
    executor.loop.run()
    lines = (folder / f"run{prefetch}" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines][max(1, steps // 4) :]  # the first step has no times
    step, data = (sum(record[name] for record in records) / len(records) for name in ("step_seconds", "data_seconds"))
    load = round(os.getloadavg()[0], 1)
    shown = {"step_ms": round(step * 1e3, 2), "data_ms": round(data * 1e3, 4), "share": round(data / step, 5)}
    return {"prefetch": prefetch, **shown, "load": load}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", action="store_true")
    parser.add_argument("--steps", type=int, default=40, help="steps of each run of --waiting")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.waiting:
            for prefetch in (0, 2):
                print(json.dumps(waiting(folder, prefetch, args.steps)), flush=True)
            return
        stores = {
            "rows": [shard(folder, "one", DOCUMENTS)],
            "masked": [shard(folder, "masked", DOCUMENTS, masked=True)],
            "mixture": [shard(folder, f"part{number}", DOCUMENTS // 3) for number in range(3)],
        }
        for capacity, micro in ((CAPACITY, 1), (CAPACITY, 8), (64, 4)):
            print(json.dumps(measure(folder, stores, capacity, micro)), flush=True)


if __name__ == "__main__":
    main()
