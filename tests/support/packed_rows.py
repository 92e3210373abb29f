"""Rows of small numbers, packed, and inputs of losses."""

from itertools import pairwise
from math import ceil

import numpy as np
import torch

from xtrain.runtime.feed.packing.rows import Rows
from xtrain.runtime.nn.loss import IGNORE, Head

# Packed rows written out, and the rules of packing again, written for reading -----------------------------------------


Segment = tuple[int, int, int]


def row_segments(rows: Rows, lengths: list[int]) -> list[list[Segment]]:
    """(document, start, positions) of the segments of each row."""
    segments = list(zip(*(values.tolist() for values in rows.segments(np.array(lengths, np.int64))), strict=True))
    bounds = rows.row_offsets.tolist()
    assert (bounds[0], bounds[-1]) == (0, len(segments))
    assert rows.num_positions == sum(length for *_, length in segments)
    return [segments[a:b] for a, b in pairwise(bounds)]


def room(positions: int, align: int) -> int:
    return ceil(positions / align) * align


def plain_next_fit(lengths: list[int], capacity: int, oversized: str, align: int = 1) -> list[list[Segment]]:
    """Closed rows and one open row."""
    closed: list[list[Segment]] = []
    open_row: list[Segment] = []
    for document, tokens in enumerate(lengths):
        positions, start = tokens - 1, 0
        if positions < 1 or (positions > capacity and oversized == "skip"):
            continue
        if positions > capacity and oversized == "truncate":
            positions = capacity
        if sum(room(length, align) for *_, length in open_row) + room(positions, align) > capacity:
            closed.append(open_row)
            open_row = []
        while positions - start > capacity:
            closed.append([(document, start, capacity)])
            start += capacity
        open_row.append((document, start, positions - start))
    return [row for row in [*closed, open_row] if row]


def items_of(lengths: list[int], capacity: int, oversized: str, align: int) -> tuple[list[int], int]:
    """What is to be fitted in, in multiples of `align`, and how many full rows are cut off first."""
    items, full = [], 0
    for positions in (tokens - 1 for tokens in lengths if tokens > 1):
        if positions > capacity:
            if oversized == "skip":
                continue
            full += positions // capacity if oversized == "split" else 0
            positions = positions % capacity if oversized == "split" else capacity
        if positions:
            items.append(room(positions, align) // align)
    return items, full


def plain_first_fit(items: list[int], capacity: int) -> list[int]:
    """What is left in each row."""
    left: list[int] = []
    for item in items:
        row = next((row for row, rest in enumerate(left) if rest >= item), None)
        if row is None:
            left.append(capacity - item)
        else:
            left[row] -= item
    return left


def plain_best_fit_decreasing(items: list[int], capacity: int) -> list[int]:
    """What is left in each row, ascending."""
    left: list[int] = []
    for item in sorted(items, reverse=True):
        fits = [rest for rest in left if rest >= item]
        if fits:
            left.remove(min(fits))
            left.append(min(fits) - item)
        else:
            left.append(capacity - item)
    return sorted(left)


# A module of collators that make pairs and sequences, with numbers that losses read, of any lines of ------------------


# Pairs and sequences of unequal length from the lines of the trials, with numbers that are made of their tokens, some
# tokens without a label, where the numbers are large, and some sequences without any label.
PARTS = """
import torch
from attrs import evolve
from xtrain import IGNORE_INDEX, collator

def numbered(sample, first, end, side):
    tokens, labels = sample.tokens[first:end], sample.labels[first:end]
    hidden = (tokens % 5 == 0) | (int(tokens.sum()) % 7 == 0)
    made = {
        "ref_logprobs": -(labels % 7) / 4 - 0.2,
        "logprobs": -(labels % 6) / 3 - 0.1,
        "advantages": (tokens % 4) - 1.3,
        "weights": (labels % 3) / 2,
    }
    columns = {name: torch.where(hidden, 60.0, values.float()) for name, values in made.items()}
    return evolve(
        sample,
        tokens=tokens,
        labels=torch.where(hidden, IGNORE_INDEX, labels),
        columns=columns,
        values={"label": float(len(tokens) % 2), "margin": len(tokens) % 3 / 2, "reward": len(tokens) % 4 - 1.5},
        side=side,
    )

@collator(takes="labelled samples")
def pairs(samples):
    for sample in samples:
        cut = len(sample.tokens) // 3 // 8 * 8
        if cut:
            yield numbered(sample, 0, cut, 0)
            yield numbered(sample, cut, len(sample.tokens), 1)

@collator(takes="labelled samples")
def sequences(samples):
    for sample in samples:
        yield numbered(sample, 0, len(sample.tokens), 0)
"""
CHAIN = 'use "numbered.py"\ncollate = to_tensor -> flatten -> shift_tokens -> {kind}() -> pack(sequential, align = 8)\n'

# What the loss of a head is tried on ----------------------------------------------------------------------------------


T, D, V = 37, 16, 50


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, D, dtype=torch.float64, generator=generator).requires_grad_()
    weight = torch.randn(V, D, dtype=torch.float64, generator=generator).requires_grad_()
    labels = torch.randint(0, V, (T,), generator=generator)
    labels[::5] = IGNORE
    labels[20:30] = IGNORE  # at some sizes a whole chunk has no valid label
    return hidden, weight, labels


def head(z_weight: float, per_chunk: int) -> Head:
    return Head(vocabulary=V, z_weight=z_weight, chunk_bytes=4 * V * per_chunk)
