"""Packing: rows, documents per second and memory, beside first fit in groups of 100,000 as other trainers write it.

    python benchmarks/packing.py                     # 1 M documents, three length distributions, two row lengths
    python benchmarks/packing.py --documents 10M --capacity 8192
    python benchmarks/packing.py --lengths uniform --capacity 8192

Both sides run in one process, in turns, on one thread; figures are processor time, the least of the turns, of which
what takes seconds has fewer, and its memory is not measured again. Ours runs once more on all cores, timed by the
clock, which says something on an idle machine only. Memory is the growth of the peak resident size of a process of its
own, over what it had with the lengths read. Prints a JSON line for each row length and distribution. `bound` is the
tokens over the row length, rounded up: no packing takes fewer rows.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np

from xtrain.components.packings.multipack_run import pack as pack_multipack
from xtrain.components.packings.sequential_run import pack as pack_sequential

GROUP = 100_000
ALL = 1 << 40
KINDS = ("log-normal", "uniform", "short")
# What has had turns of so many seconds in all gets no more of them.
SLOW = 9.0


def lengths_of(kind: str, documents: int) -> np.ndarray:
    """Positions of each document, int32."""
    rng = np.random.default_rng(0)
    if kind == "log-normal":
        values = np.clip(np.rint(np.exp(rng.normal(np.log(350), 1.1, documents))), 16, 8192)
    elif kind == "uniform":
        values = rng.integers(16, 8193, documents)
    else:
        values = np.clip(rng.geometric(1 / 60, documents), 4, 8192)
    return values.astype(np.int32)


@numba.njit
def first_fit_group(lengths, offset, capacity):
    """The first of the open rows that has room takes the document, or a new one does."""
    left = []
    rows = []
    for number, size in enumerate(lengths):
        for row in range(len(left)):
            if left[row] >= size:
                left[row] -= size
                rows[row].append(number + offset)
                break
        else:
            left.append(capacity - size)
            rows.append([number + offset])
    return rows


def first_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Groups of 100,000 documents one after the other: what the trainers that call it multipack do."""
    rows: list[list[int]] = []
    for first in range(0, len(lengths), GROUP):
        rows += first_fit_group(lengths[first : first + GROUP], first, capacity)
    return rows


def next_fit_lists(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Packing in order, as lists of lists."""
    rows: list[list[int]] = []
    row: list[int] = []
    filled = 0
    for number, size in enumerate(lengths.tolist()):
        if filled + size > capacity:
            rows.append(row)
            row, filled = [], 0
        row.append(number)
        filled += size
    return [*rows, row] if row else rows


def methods(lengths: np.ndarray, capacity: int) -> dict[str, Callable[[], int]]:
    """Name → what packs these lengths and says how many rows that took."""
    tokens = lengths + np.int32(1)  # a document of n positions has n + 1 tokens

    def multipack(group: int) -> int:
        return pack_multipack(tokens, capacity, "error", group=group, threads=1).num_rows

    return {
        "multipack": lambda: multipack(ALL),
        "multipack_100k": lambda: multipack(GROUP),
        "first_fit": lambda: len(first_fit(lengths, capacity)),
        "sequential": lambda: pack_sequential(tokens, capacity, "error").num_rows,
        "sequential_lists": lambda: len(next_fit_lists(lengths, capacity)),
    }


def measure(kind: str, documents: int, capacity: int, turns: int) -> dict[str, object]:
    lengths = lengths_of(kind, documents)
    packers = methods(lengths, capacity)
    for warm in methods(lengths_of(kind, 20_000), capacity).values():
        warm()
    seconds: dict[str, float] = dict.fromkeys(packers, np.inf)
    rows: dict[str, int] = {}
    for turn in range(turns):
        for name, packer in packers.items():
            if turn * seconds[name] > SLOW and turn:
                continue
            begin = time.thread_time()
            rows[name] = packer()
            seconds[name] = min(seconds[name], time.thread_time() - begin)
    cores = len(os.sched_getaffinity(0))
    clock = {threads: wall(lengths, capacity, threads, turns) for threads in (1, cores)}
    quick = [name for name in packers if seconds[name] < SLOW]
    bytes_each = {name: peak_growth(kind, documents, capacity, name) / documents for name in quick}
    return {
        "lengths": kind,
        "documents": documents,
        "capacity": capacity,
        "bound": -(-int(lengths.sum(dtype=np.int64)) // capacity),
        "rows": rows,
        "million_documents_per_second": {name: round(documents / s / 1e6, 2) for name, s in seconds.items()},
        "times_first_fit": {
            name: round(seconds["first_fit"] / seconds[name], 1) for name in ("multipack", "multipack_100k")
        },
        "times_sequential_lists": round(seconds["sequential_lists"] / seconds["sequential"], 1),
        "milliseconds_by_the_clock": {f"{threads} threads": round(s * 1e3, 2) for threads, s in clock.items()},
        "load": round(os.getloadavg()[0], 1),
        "bytes_per_document": {name: round(value, 1) for name, value in bytes_each.items()},
    }


def wall(lengths: np.ndarray, capacity: int, threads: int, turns: int) -> float:
    """Seconds that packing all documents together takes with so many threads, the least of the turns."""
    tokens, least = lengths + np.int32(1), np.inf
    for _ in range(turns):
        begin = time.perf_counter()
        pack_multipack(tokens, capacity, "error", group=ALL, threads=threads)
        least = min(least, time.perf_counter() - begin)
    return least


def peak_growth(kind: str, documents: int, capacity: int, name: str) -> int:
    """Bytes by which the peak resident size of a process grows while it packs."""
    command = [sys.executable, __file__, "--memory-of", name, "--lengths", kind]
    command += ["--documents", str(documents), "--capacity", str(capacity)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def own_peak_growth(kind: str, documents: int, capacity: int, name: str) -> int:
    methods(lengths_of(kind, 20_000), capacity)[name]()  # compiled code is read before
    packer = methods(lengths_of(kind, documents), capacity)[name]
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not serve now
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident("VmRSS")
    packer()
    return resident("VmHWM") - before


def resident(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def count(text: str) -> int:
    return int(float(text.rstrip("Mk")) * {"M": 10**6, "k": 10**3}.get(text[-1], 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=count, default=10**6)
    parser.add_argument("--capacity", type=int, nargs="*", default=[8192, 32768])
    parser.add_argument("--lengths", choices=KINDS, nargs="*", default=list(KINDS))
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    for capacity in args.capacity:
        for kind in args.lengths:
            if args.memory_of:
                print(own_peak_growth(kind, args.documents, capacity, args.memory_of))
            else:
                print(json.dumps(measure(kind, args.documents, capacity, args.turns)), flush=True)


if __name__ == "__main__":
    main()
