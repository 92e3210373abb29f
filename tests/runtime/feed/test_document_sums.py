"""Lengths of documents, counted from what every collator leaves behind of rows."""

import numpy as np
import pytest
from examples import drawn
from hypothesis import given
from hypothesis import strategies as st

from xtrain.components.collators.flatten_torch import flatten
from xtrain.components.collators.pack_torch import pack
from xtrain.components.collators.shard_torch import shard
from xtrain.components.collators.shift_tokens_torch import shift_tokens
from xtrain.components.collators.to_tensor_torch import to_tensor
from xtrain.plan.arithmetic import LONGEST_PADDING
from xtrain.runtime.feed.collate import compose, decode_outline, encode_outline
from xtrain.runtime.feed.microbatch import DocumentSums
from xtrain.runtime.feed.packing.stored_rows import RawRow

STAGES = [to_tensor(), flatten(), shift_tokens()]


def rows(*lengths: list[int]) -> list[RawRow]:
    """Rows of documents with so many positions each, which are one token longer."""
    return [RawRow(segments=[np.full(length + 1, 7, dtype=np.uint16) for length in row]) for row in lengths]


def test_documents_count_and_padding_does_not():
    batch = compose([*STAGES, pack(capacity=8)])(rows([3, 2], [8], []))
    assert DocumentSums.of([batch]) == DocumentSums(tokens=13, pairs=9 + 4 + 64, laid_pairs=9 + 4 + 9 + 64 + 64)
    assert DocumentSums.of([batch, batch]).pairs == 2 * 77 and DocumentSums.of([]) == DocumentSums()


def test_padding_of_a_document_is_laid_out_with_it():
    batch = compose([*STAGES, pack(capacity=16, align=4)])(rows([3, 5]))
    assert DocumentSums.of([batch]) == DocumentSums(tokens=8, pairs=9 + 25, laid_pairs=16 + 64 + 16)


def test_long_padding_is_several_segments():
    capacity = 2 * LONGEST_PADDING + 10
    batch = compose([*STAGES, pack(capacity=capacity)])(rows([10]))
    assert DocumentSums.of([batch]) == DocumentSums(10, 100, 100 + 2 * LONGEST_PADDING**2)


def test_what_is_not_learned_from_is_a_document_all_the_same():
    conversation = RawRow(segments=[np.arange(6, dtype=np.uint16)], trained=[np.zeros(6, dtype=np.bool_)])
    batch = compose([*STAGES, pack(capacity=5)])([conversation])
    assert batch.num_valid == 0 and DocumentSums.of([batch]) == DocumentSums(5, 25, 25)


@pytest.mark.parametrize("ring, ulysses", [(2, 1), (1, 2), (2, 2)])
def test_parts_of_rows_have_the_sums_of_whole_ones(ring, ulysses):
    laid = [*STAGES, pack(capacity=16, align=2 * ring)]
    whole = compose(laid)(rows([3, 5], [12]))
    for ring_rank, ulysses_rank in np.ndindex(ring, ulysses):
        part = shard(ring=ring, ulysses=ulysses, ring_rank=ring_rank, ulysses_rank=ulysses_rank)
        assert DocumentSums.of([compose([*laid, part])(rows([3, 5], [12]))]) == DocumentSums.of([whole])


@drawn(15, 300)
@given(st.lists(st.lists(st.integers(1, 6), max_size=4), min_size=1, max_size=3), st.sampled_from([1, 2, 4]))
def test_they_are_the_sums_by_hand(lengths, align):
    batch = compose([*STAGES, pack(capacity=32, align=align)])(rows(*lengths))
    found = DocumentSums.of([batch])
    assert found.tokens == sum(map(sum, lengths)) == int(batch.real_BS.sum())
    assert found.pairs == sum(length**2 for row in lengths for length in row)
    shared = decode_outline(encode_outline([batch], 32))
    assert DocumentSums.of(shared) == found, "stages that read no rows find the same"
