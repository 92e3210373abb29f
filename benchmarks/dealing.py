"""Dealing rows to data ranks: how evenly attention's cost comes out, with and without `pack(best_fit)`.

    python benchmarks/dealing.py

Documents of three length distributions in rows of 8,192 (by best fit, in groups of 100,000), in the order of a run.
Attention costs a rank the sum of length² over its documents. Ranks wait for each other in every microbatch, so what
counts is the dearest rank over the mean of all in each; `step` is the same over whole steps, where they only wait at
the end of a step (one microbatch, or gradients exchanged once). 1 means that nobody waits. `multipack` deals rows as
they come, `best_fit` by cost; `least` is what no dealing of these rows can beat: the mean, or the dearest row. Prints a
JSON line for each distribution and layout. Milliseconds are those of dealing a step, on every rank.
"""

import argparse
import json
import time

import numpy as np
from packing import KINDS, count, lengths_of

from xtrain.components.packings.multipack_run import pack as pack_multipack
from xtrain.runtime.feed.curriculum import RowOrder
from xtrain.runtime.feed.row_kernels import deal

CAPACITY = 8192
# Rows of a rank in a microbatch, and microbatches of a step.
LAYOUTS = ((1, 1), (1, 4), (1, 16), (4, 1), (4, 4))


def row_costs(kind: str, documents: int) -> np.ndarray:
    """The sum of length² of every row, in the order in which a run reads rows."""
    lengths = lengths_of(kind, documents).astype(np.int64)
    rows = pack_multipack(lengths + 1, CAPACITY, "error", group=100_000)
    costs = np.add.reduceat(lengths[rows.document] ** 2, rows.row_offsets[:-1])
    return costs[RowOrder(len(costs), 0).rows(0, len(costs))]


def measure(kind: str, costs: np.ndarray, ranks: int, micro: int, accumulate: int, steps: int) -> dict[str, object]:
    each = ranks * micro * accumulate
    some = costs[: len(costs) // each * each].reshape(-1, each)[:steps]
    spent: dict[str, list[np.ndarray]] = {"multipack": [], "best_fit": []}
    begin = time.thread_time()
    dealt = [deal(step, accumulate, ranks, micro) for step in some]
    seconds = (time.thread_time() - begin) / len(some)
    for step, hands in zip(some, dealt, strict=True):
        spent["multipack"].append(step.reshape(accumulate, ranks, micro).sum(axis=2))
        spent["best_fit"].append(step[hands].sum(axis=2))
    result: dict[str, object] = {"lengths": kind, "ranks": ranks, "micro": micro, "accumulate": accumulate}
    for name, costs_SAR in ((name, np.stack(values)) for name, values in spent.items()):
        by_step = costs_SAR.sum(axis=1)
        result[name] = round(float((costs_SAR.max(axis=2) / costs_SAR.mean(axis=2)).mean()), 3)
        result[f"{name}_step"] = round(float((by_step.max(axis=1) / by_step.mean(axis=1)).mean()), 3)
    # In a microbatch the dearest rows of the step stand together at best.
    mean = some.sum(axis=1) / ranks
    result["least_step"] = round(float((np.maximum(some.max(axis=1), mean) / mean).mean()), 3)
    return {**result, "deal_ms": round(seconds * 1e3, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=count, default=10**6)
    parser.add_argument("--lengths", choices=KINDS, nargs="*", default=list(KINDS))
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 64])
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    deal(np.arange(4), 2, 2, 1)  # compiled code is read before
    for kind in args.lengths:
        costs = row_costs(kind, args.documents)
        for ranks in args.ranks:
            for micro, accumulate in LAYOUTS:
                print(json.dumps(measure(kind, costs, ranks, micro, accumulate, args.steps)), flush=True)


if __name__ == "__main__":
    main()
