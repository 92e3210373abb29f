"""Which positions a context-parallel rank holds: the reference's vectors, and every position on one rank."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrain.components.collators.flatten_torch import flatten
from xtrain.components.collators.pack_torch import pack
from xtrain.components.collators.shard_torch import shard
from xtrain.components.collators.shift_tokens_torch import shift_tokens
from xtrain.components.collators.to_tensor_torch import to_tensor
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.collate import compose, local_positions, zigzag
from xtrain.runtime.feed.microbatch import IGNORE_INDEX, Microbatch
from xtrain.runtime.feed.packing.stored_rows import RawRow

STAGES = [to_tensor(), flatten(), shift_tokens()]


def span(first: int, last: int) -> list[int]:
    return list(range(first, last + 1))


@pytest.mark.parametrize(("lengths", "ranks"), [
    ([40], [span(0, 9) + span(30, 39), span(10, 19) + span(20, 29)]),
    ([20, 20], [span(0, 4) + span(15, 19) + span(20, 24) + span(35, 39),
            span(5, 9) + span(10, 14) + span(25, 29) + span(30, 34)]),
    ([6, 12], [[0, 5, 6, 7, 16, 17], [1, 4, 8, 9, 14, 15], [2, 3, 10, 11, 12, 13]]),
    ([2, 4], [[0, 1, 2, 3, 4, 5]]),
])  # fmt: skip
def test_the_vectors_of_the_reference(lengths: list[int], ranks: list[list[int]]):
    found = [zigzag(torch.tensor(lengths), len(ranks), rank) for rank in range(len(ranks))]
    assert [indices.tolist() for indices in found] == ranks
    assert {indices.dtype for indices in found} == {torch.int64}


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(1, 5))
def test_putting_positions_back_undoes_the_order(units: list[int], ring: int):
    lengths = torch.tensor(units) * 2 * ring
    order = torch.cat([zigzag(lengths, ring, rank) for rank in range(ring)])
    row = torch.arange(int(lengths.sum())) * 3 + 1
    restored = torch.empty_like(row)
    restored[order] = row[order]
    assert order.sort().values.tolist() == list(range(len(row)))
    assert torch.equal(restored, row)


def test_segments_that_cannot_be_dealt_are_named():
    with pytest.raises(DataError, match="a segment of 18 positions cannot be cut into 4 equal chunks") as caught:
        zigzag(torch.tensor([8, 18, 6]), 2, 0)
    assert "divisible by 4" in str(caught.value)


def batch_of(rows: list[list[int]], capacity: int, align: int) -> Microbatch:
    """Rows of documents of so many positions, every token another number, every third one not trained."""
    numbers = iter(range(1, 10**6))
    read = []
    for place, row in enumerate(rows):
        tokens = [np.array([next(numbers) for _ in range(n + 1)], dtype=np.uint32) for n in row]
        trained = [(ids % 3 > 0).astype(np.uint8) for ids in tokens]
        read.append(RawRow(segments=tokens, trained=trained, dataset=place % 2, position=place))
    return compose([*STAGES, pack(capacity=capacity, align=align)])(read)


def parts_of(batch: Microbatch, ring: int, ulysses: int) -> list[Microbatch]:
    ranks = [(r, u) for r in range(ring) for u in range(ulysses)]
    return [shard(ring=ring, ulysses=ulysses, ring_rank=r, ulysses_rank=u)(batch) for r, u in ranks]


ROWS = st.lists(st.lists(st.integers(1, 20), max_size=3), min_size=1, max_size=3)


@given(ROWS, st.integers(1, 4), st.integers(1, 4))
@settings(deadline=None)
def test_ranks_share_out_every_row_between_them(rows: list[list[int]], ring: int, ulysses: int):
    align = 2 * ring if ring > 1 else 1
    needed = max(sum(-(-n // align) * align for n in row) for row in rows)
    unit = align * ulysses
    capacity = max(1, -(-needed // unit)) * unit
    batch = batch_of(rows, capacity, align)
    indices = [local_positions(batch, ring, ulysses, r, u) for r in range(ring) for u in range(ulysses)]
    joined = torch.cat(indices, dim=1).sort(dim=1).values
    assert joined.tolist() == torch.arange(len(rows) * capacity).view(len(rows), capacity).tolist()

    parts = parts_of(batch, ring, ulysses)
    for index, part in zip(indices, parts, strict=True):
        assert part.input_ids_BS.shape == (len(rows), capacity // ring // ulysses)
        for name in ("input_ids_BS", "labels_BS", "positions_BS", "real_BS"):
            assert torch.equal(getattr(part, name), getattr(batch, name).flatten()[index])
        assert part.num_valid == int((part.labels_BS != IGNORE_INDEX).sum())
        assert torch.equal(part.cumulative_lengths, batch.cumulative_lengths)
        assert torch.equal(part.real_lengths, batch.real_lengths)
        assert part.dataset_B is batch.dataset_B and part.place_B is batch.place_B
        assert part.sequence == capacity
    assert sum(part.num_valid for part in parts) == batch.num_valid


def test_ring_is_outer_and_ulysses_cuts_its_parts():
    batch = batch_of([[16]], 16, 4)
    assert [local_positions(batch, 2, 2, r, u).tolist() for r in range(2) for u in range(2)] == [
        [[0, 1, 2, 3]],
        [[12, 13, 14, 15]],
        [[4, 5, 6, 7]],
        [[8, 9, 10, 11]],
    ]
    assert local_positions(batch_of([[3, 5], [8]], 8, 1), 1, 2, 0, 1).tolist() == [[4, 5, 6, 7], [12, 13, 14, 15]]


def test_rows_that_cannot_be_cut_evenly():
    with pytest.raises(DataError, match="rows of 12 positions are not divisible by 2 · 4 ranks"):
        parts_of(batch_of([[12]], 12, 4), 2, 4)


def test_a_chain_ends_with_the_part_of_a_rank():
    part = shard(ring=2, ulysses=1, ring_rank=1, ulysses_rank=0)
    chain = compose([*STAGES, pack(capacity=8, align=4), part])
    row = RawRow(segments=[np.arange(1, 9, dtype=np.uint16)])
    batch = chain([row])
    assert batch.input_ids_BS.tolist() == [[3, 4, 5, 6]]
    whole = compose([*STAGES, pack(capacity=8, align=4)])([row])
    assert chain.local_part(whole).input_ids_BS.tolist() == [[3, 4, 5, 6]]
    with pytest.raises(DataError, match="`shard` takes microbatch, but `shard` gives part of a microbatch"):
        compose([*STAGES, pack(capacity=8, align=4), part, part])
