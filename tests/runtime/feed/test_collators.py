"""The collation chain: shifted labels, packed rows, padding, and stages that do not fit together."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from attrs import evolve
from examples import drawn
from hypothesis import given
from hypothesis import strategies as st

from xtrain.components.collators.flatten_torch import flatten
from xtrain.components.collators.pack_torch import pack
from xtrain.components.collators.shift_tokens_torch import shift_tokens
from xtrain.components.collators.to_tensor_torch import to_tensor
from xtrain.dsl.schema.data_components import TOKEN_SAMPLES
from xtrain.plan.arithmetic import LONGEST_PADDING
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.collate import Stage, compose
from xtrain.runtime.feed.microbatch import IGNORE_INDEX, Microbatch, Samples
from xtrain.runtime.feed.packing.stored_rows import UNKNOWN, RawRow


def collate(rows: list[list[list[int]]], capacity: int, align: int = 1) -> Microbatch:
    chain = compose([to_tensor(), flatten(), shift_tokens(), pack(capacity=capacity, align=align)])
    return chain([RawRow(segments=[np.array(segment, dtype=np.uint16) for segment in row]) for row in rows])


def collated(rows: list[RawRow]) -> Microbatch:
    return compose([to_tensor(), flatten(), shift_tokens(), pack(capacity=2)])(rows)


def test_documents_of_a_row_are_shifted_apart():
    # The stream 5 6 0 | 7 8 9 0 | 3 4 of three documents: no label is another document's token.
    batch = collate([[[5, 6, 0], [7, 8, 9, 0], [3, 4]]], capacity=8)
    assert batch.input_ids_BS.tolist() == [[5, 6, 7, 8, 9, 3, 0, 0]]
    assert batch.labels_BS.tolist() == [[6, 0, 8, 9, 0, 4, IGNORE_INDEX, IGNORE_INDEX]]
    assert batch.positions_BS.tolist() == [[0, 1, 0, 1, 2, 0, 0, 1]]
    assert batch.cumulative_lengths.tolist() == [0, 2, 5, 6, 8]
    assert batch.real_BS.tolist() == [[True] * 6 + [False] * 2]
    assert batch.real_lengths.tolist() == [2, 3, 1, 0]
    assert (batch.num_valid, batch.sequence) == (6, 8)


def test_documents_are_padded_within_their_segments():
    batch = collate([[[5, 6, 0], [7, 8, 9, 0, 2], [3, 4, 1, 2, 6, 7]]], capacity=20, align=4)
    none = IGNORE_INDEX
    assert batch.input_ids_BS.tolist() == [[5, 6, 0, 0, 7, 8, 9, 0, 3, 4, 1, 2, 6, 0, 0, 0, 0, 0, 0, 0]]
    assert batch.labels_BS.tolist() == [
        [6, 0, none, none, 8, 9, 0, 2, 4, 1, 2, 6, 7, none, none, none, none, none, none, none]
    ]
    assert batch.positions_BS.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]]
    assert "".join("x" if real else "." for real in batch.real_BS[0].tolist()) == "xx..xxxxxxxxx......."
    assert batch.cumulative_lengths.tolist() == [0, 4, 8, 16, 20]
    assert batch.real_lengths.tolist() == [2, 4, 5, 0]
    assert batch.num_valid == 11


def test_rows_say_which_dataset_they_are_of():
    def rows(*datasets: int) -> list[RawRow]:
        return [RawRow(segments=[np.array([1, 2], dtype=np.uint16)], dataset=dataset) for dataset in datasets]

    dataset_B = collated(rows(1, 0, 1)).dataset_B
    assert dataset_B is not None and dataset_B.dtype == torch.int64 and dataset_B.tolist() == [1, 0, 1]
    assert collated(rows(UNKNOWN, UNKNOWN)).dataset_B is None
    assert collated([*rows(2), RawRow(segments=[])]).dataset_B.tolist() == [2, UNKNOWN]


def test_rows_say_where_they_stand_in_the_run():
    rows = [RawRow(segments=[np.array([1, 2], dtype=np.uint16)], position=position) for position in (70, 71)]
    place_B = collated(rows).place_B
    assert place_B is not None and place_B.dtype == torch.int64 and place_B.tolist() == [70, 71]
    assert collate([[[1, 2]]], capacity=2).place_B is None


def test_a_row_of_samples_of_several_datasets_is_refused():
    """A stage of the user's own can move samples: their losses could not be told apart any more."""

    def into_one(value: Samples) -> Samples:
        return Samples(num_rows=1, samples=tuple(evolve(sample, row=0) for sample in value.samples))

    between = Stage(name="merge", takes=TOKEN_SAMPLES, gives=TOKEN_SAMPLES, function=into_one)
    chain = compose([to_tensor(), flatten(), between, shift_tokens(), pack(capacity=4)])
    rows = [RawRow(segments=[np.array([1, 2], dtype=np.uint16)], dataset=dataset) for dataset in (0, 1)]
    assert chain([rows[0], rows[0]]).num_valid == 2
    with pytest.raises(DataError, match="row 0 has samples of several datasets"):
        chain(rows)


def test_types_are_as_documented():
    batch = collate([[[1, 2]]], capacity=4)
    types = [tensor.dtype for tensor in (batch.input_ids_BS, batch.labels_BS, batch.positions_BS)]
    assert types == [torch.int64] * 3
    assert batch.real_BS.dtype == torch.bool and batch.real_lengths.dtype == torch.int32
    assert batch.cumulative_lengths.dtype == torch.int32


SEGMENTS = st.lists(st.integers(2, 8), max_size=4)


@given(st.lists(SEGMENTS, min_size=1, max_size=4), st.integers(0, 2 * LONGEST_PADDING + 3))
@drawn(30, 600)
def test_segments_never_mix(lengths: list[list[int]], slack: int):
    capacity = max(1, max(sum(n - 1 for n in row) for row in lengths) + slack)
    numbers = iter(range(1, 1000))
    rows = [[[next(numbers) for _ in range(n)] for n in row] for row in lengths]
    batch = collate(rows, capacity)
    flat = [(row, segment) for row, segments in enumerate(rows) for segment in segments]

    # Each valid position reads a token and is labelled with its successor in the same segment.
    successor = {a: b for _, segment in flat for a, b in pairwise(segment)}
    valid = batch.labels_BS != IGNORE_INDEX
    inputs, labels = batch.input_ids_BS[valid].tolist(), batch.labels_BS[valid].tolist()
    assert inputs == [token for _, segment in flat for token in segment[:-1]]
    assert labels == [successor[token] for token in inputs]
    assert batch.num_valid == len(inputs)
    assert not batch.input_ids_BS[~valid].any()

    # Segments tile the microbatch, stay inside rows, and hold one sample or one run of padding.
    bounds = batch.cumulative_lengths.tolist()
    assert (bounds[0], bounds[-1]) == (0, len(rows) * capacity)
    sizes = [b - a for a, b in pairwise(bounds)]
    assert min(sizes) > 0
    assert set(range(0, bounds[-1] + 1, capacity)) <= set(bounds)
    positions, kinds = batch.positions_BS.flatten().tolist(), valid.flatten().tolist()
    samples = []
    for a, b in pairwise(bounds):
        assert positions[a:b] == list(range(b - a))
        assert len(set(kinds[a:b])) == 1
        if kinds[a]:
            samples.append(b - a)
        else:
            assert b - a <= LONGEST_PADDING
    assert samples == [len(segment) - 1 for _, segment in flat]


def test_padding_counts_to_1024_and_starts_again():
    batch = collate([[[1, 2]], []], capacity=2100)
    assert batch.positions_BS[0].tolist() == [0, *(n % 1024 for n in range(2099))]
    assert batch.positions_BS[1].tolist() == [n % 1024 for n in range(2100)]
    assert batch.cumulative_lengths.tolist() == [0, 1, 1025, 2049, 2100, 3124, 4148, 4200]
    assert batch.num_valid == 1


@pytest.mark.parametrize(
    ("align", "bounds"), [(6, [0, 6, 1026, 2046, 2100]), (100, [0, 100, 1100, 2100]), (2100, [0, 2100])]
)
def test_segments_of_padding_are_aligned_too(align: int, bounds: list[int]):
    batch = collate([[[1, 2]]], capacity=2100, align=align)
    assert batch.cumulative_lengths.tolist() == bounds


def test_segments_of_padding_may_be_longer_only_where_every_segment_is():
    assert collate([[[1, 2]]], capacity=6000, align=1500).cumulative_lengths.tolist() == [0, 1500, 3000, 4500, 6000]


def test_a_row_of_nothing_is_all_padding():
    batch = collate([[], []], capacity=3)
    assert batch.labels_BS.tolist() == [[IGNORE_INDEX] * 3] * 2
    assert batch.cumulative_lengths.tolist() == [0, 3, 6]
    assert batch.num_valid == 0


def test_a_full_row_has_no_padding_segment():
    assert collate([[[1, 2, 3]], [[4, 5], [6, 7]]], capacity=2).cumulative_lengths.tolist() == [0, 2, 3, 4]


def test_samples_that_cannot_be_laid_out():
    with pytest.raises(DataError, match="row 1 needs at least 3 positions, but has 2"):
        collate([[[1, 2]], [[1, 2, 3, 4]]], capacity=2)
    with pytest.raises(DataError, match="row 0 needs at least 12 positions, but has 8"):
        collate([[[1, 2], [1, 2, 3, 4, 5, 6]]], capacity=8, align=4)
    with pytest.raises(DataError, match="rows of 10 positions do not fit documents padded to lengths divisible by 4"):
        pack(capacity=10, align=4)
    with pytest.raises(DataError, match="nothing to predict"):
        collate([[[1]]], capacity=2)


def test_the_tokens_are_copied_so_that_a_store_cannot_be_changed():
    tokens = np.array([1, 2, 3], dtype=np.int64)
    tokens.setflags(write=False)
    converted = to_tensor()([RawRow(segments=[tokens])])[0].segments[0]
    converted[0] = 9
    assert tokens[0] == 1


@pytest.mark.parametrize(("stages", "message"), [
    ([flatten()], "`flatten` takes rows of token tensors, but the loader gives rows of token arrays"),
    ([to_tensor(), flatten(), pack(capacity=4)], "`pack` takes labelled samples, but `flatten` gives token samples"),
    ([to_tensor(), flatten()], "end with token samples from `flatten`, but a step takes a microbatch"),
    ([], "end with rows of token arrays from the loader"),
])  # fmt: skip
def test_a_chain_that_does_not_fit_together(stages: list, message: str):
    with pytest.raises(DataError, match=message):
        compose(stages)
