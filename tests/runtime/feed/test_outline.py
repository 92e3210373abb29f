"""Outlines: one tensor of fixed shape tells a rank without tokens all that lies in the rows of a step."""

import numpy as np
import torch
from attrs import evolve
from examples import drawn
from hypothesis import given
from hypothesis import strategies as st

from xtrain.components.collators.flatten_torch import flatten
from xtrain.components.collators.pack_torch import pack
from xtrain.components.collators.shard_torch import shard
from xtrain.components.collators.shift_tokens_torch import shift_tokens
from xtrain.components.collators.to_tensor_torch import to_tensor
from xtrain.runtime.feed.collate import CollateChain, compose, decode_outline, encode_outline
from xtrain.runtime.feed.microbatch import Microbatch
from xtrain.runtime.feed.packing.stored_rows import RawRow

CAPACITY, ALIGN = 24, 4
ROWS = st.lists(st.lists(st.integers(1, 8), max_size=3), min_size=2, max_size=2)


def chain(rank: int | None) -> CollateChain:
    """Of whole rows, or of what a rank of a ring of two holds of them."""
    stages = [to_tensor(), flatten(), shift_tokens(), pack(capacity=CAPACITY, align=ALIGN)]
    part = [shard(ring=2, ulysses=1, ring_rank=rank, ulysses_rank=0)] if rank is not None else []
    return compose([*stages, *part])


def row_of(lengths: list[int]) -> RawRow:
    """Documents of so many tokens, of which every other one is trained: what is real is not what has a label."""
    tokens = [np.ones(length, dtype=np.uint8) for length in lengths]
    return RawRow(segments=tokens, trained=[np.arange(length, dtype=np.uint8) % 2 for length in lengths])


def assert_same_but_tokens(found: Microbatch, expected: Microbatch):
    assert found.input_ids_BS is None and found.labels_BS is None and found.num_valid == 0
    for name in ("positions_BS", "real_BS", "cumulative_lengths", "real_lengths"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), name
    assert found.sequence == expected.sequence


@given(st.lists(ROWS, min_size=1, max_size=3))
@drawn(20, 400)
def test_what_is_encoded_is_decoded(steps: list[list[list[int]]]):
    read = [[row_of([n + 1 for n in row]) for row in rows] for rows in steps]
    for rank in (None, 0, 1):
        collate = chain(rank)
        batches = [collate(rows) for rows in read]
        outline = encode_outline(batches, CAPACITY)
        assert outline.dtype == torch.int32 and outline.shape == (len(steps), 2, CAPACITY)
        found = [collate.local_part(whole) for whole in decode_outline(outline)]
        for ours, theirs in zip(found, batches, strict=True):
            assert_same_but_tokens(ours, theirs)


def test_numbers_of_rows_go_with_it():
    rows = [evolve(row_of([6, 5]), position=2**40 + 7), evolve(row_of([3]), position=-(2**33))]
    batches = [chain(None)(rows), chain(None)([row_of([2]), row_of([])])]
    outline = encode_outline(batches, CAPACITY, ("place", "dataset"))
    assert outline.shape == (2, 2, CAPACITY + 4)
    first, second = decode_outline(outline, ("place", "dataset"))
    assert first.place_B is not None and first.place_B.tolist() == [2**40 + 7, -(2**33)]
    assert first.dataset_B is second.dataset_B is second.place_B is None
    for ours, theirs in zip((first, second), batches, strict=True):
        assert_same_but_tokens(ours, theirs)


def test_padding_is_known_by_its_sign():
    batch = chain(None)([row_of([6, 5]), row_of([])])
    outline = encode_outline([batch], CAPACITY)[0].tolist()
    pads = [~n for n in range(24)]
    assert outline == [[0, 1, 2, 3, 4, ~5, ~6, ~7, 0, 1, 2, 3, *pads[:12]], pads]
