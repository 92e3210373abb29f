"""Rows laid out in one pass: bit for bit what the stages of the chain give one after the other."""

import numpy as np
import pytest
import torch
from attrs import evolve, fields
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrain.components.collators.flatten_torch import flatten
from xtrain.components.collators.pack_torch import pack
from xtrain.components.collators.shard_torch import shard
from xtrain.components.collators.shift_tokens_torch import shift_tokens
from xtrain.components.collators.to_tensor_torch import to_tensor
from xtrain.plan.arithmetic import LONGEST_PADDING
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.collate import CollateChain, Stage, compose, longest_padding
from xtrain.runtime.feed.loader import RowFeeder
from xtrain.runtime.feed.microbatch import IGNORE_INDEX, Microbatch
from xtrain.runtime.feed.packing.rows import Oversized, pack_rows
from xtrain.runtime.feed.packing.stored_rows import PADDING
from xtrain.runtime.feed.row_kernels import lay_rows
from xtrain.runtime.feed.token_store import TokenStore

LENGTHS = st.lists(st.integers(2, 30), min_size=1, max_size=40)


def stages(capacity: int, align: int = 1) -> list[Stage]:
    return [to_tensor(), flatten(), shift_tokens(), pack(capacity=capacity, align=align)]


def feeder(store: TokenStore, capacity: int, align: int = 1, oversized: Oversized = "split", more=(), **changed):
    documents = np.arange(store.num_documents, dtype=np.int64)[::-1].copy()
    packing: dict = {"method": "sequential", "group": 7, **changed}
    rows = pack_rows(store.lengths_of(documents), capacity, oversized, align, **packing)
    return RowFeeder(store=store, documents=documents, rows=rows, collate=compose([*stages(capacity, align), *more]))


def step_by_step(fed: RowFeeder, indices: np.ndarray) -> Microbatch:
    return fed.collate([fed.row(index) for index in indices.tolist()])


def assert_same(found: Microbatch, expected: Microbatch) -> None:
    for name in (attribute.name for attribute in fields(Microbatch)):
        one, other = getattr(found, name), getattr(expected, name)
        if isinstance(other, torch.Tensor):
            assert one.dtype == other.dtype and one.shape == other.shape, name
            assert torch.equal(one, other), name
        else:
            assert (type(one), one) == (type(other), other), name


@given(
    LENGTHS,
    st.integers(1, 12),
    st.integers(1, 3),
    st.sampled_from(["split", "truncate", "skip"]),
    st.sampled_from(["sequential", "multipack"]),
    st.data(),
)
@settings(deadline=None)
def test_rows_are_what_the_stages_give(
    make_store, lengths: list[int], units: int, align: int, oversized: Oversized, method: str, data
):
    fed = feeder(make_store(lengths), units * align, align, oversized, method=method)
    indices = data.draw(st.lists(st.integers(PADDING, fed.rows.num_rows - 1), min_size=1, max_size=5))
    asked = np.array(indices, dtype=np.int64)
    assert_same(fed.microbatch(asked), step_by_step(fed, asked))


def masked(store: TokenStore, trained: np.ndarray) -> TokenStore:
    return evolve(store, trained=trained.astype(np.uint8))


@given(
    st.lists(st.integers(2, 30), min_size=1, max_size=20),
    st.integers(1, 12),
    st.integers(1, 3),
    st.sampled_from(["split", "truncate", "skip"]),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.data(),
)
@settings(deadline=None)
def test_only_trained_tokens_become_labels(
    make_store, lengths: list[int], units: int, align: int, oversized: Oversized, share: float, data
):
    plain = make_store(lengths)
    chance = np.random.default_rng(data.draw(st.integers(0, 1 << 20))).random(plain.num_tokens)
    fed = feeder(masked(plain, chance < share), units * align, align, oversized)
    indices = data.draw(st.lists(st.integers(PADDING, fed.rows.num_rows - 1), min_size=1, max_size=5))
    asked = np.array(indices, dtype=np.int64)
    found = fed.microbatch(asked)
    assert_same(found, step_by_step(fed, asked))

    # Every token of the store is its number from 1 on: a label says itself where it stood.
    whole = feeder(plain, units * align, align, oversized).microbatch(asked)
    assert found.labels_BS is not None and whole.labels_BS is not None
    trained_BS = (whole.labels_BS != IGNORE_INDEX) & torch.from_numpy(chance < share)[whole.labels_BS.clamp(min=1) - 1]
    assert torch.equal(found.labels_BS, torch.where(trained_BS, whole.labels_BS, IGNORE_INDEX))
    assert found.num_valid == int(trained_BS.sum())
    for name in ("input_ids_BS", "positions_BS", "real_BS", "cumulative_lengths", "real_lengths"):
        assert torch.equal(getattr(found, name), getattr(whole, name)), name


def test_masks_are_those_of_the_predicted_tokens(make_store):
    """Documents 1 2 3 4 5 and 6 7 8, rows of 3 positions: a label is masked as the token it names, across a cut too."""
    trained = np.array([1, 0, 1, 0, 1, 1, 1, 0])
    fed = feeder(masked(make_store([5, 3]), trained), 3)
    found = fed.microbatch(np.arange(fed.rows.num_rows))
    labels = dict(zip(found.input_ids_BS.flatten().tolist(), found.labels_BS.flatten().tolist(), strict=True))
    none = IGNORE_INDEX
    assert labels == {1: none, 2: 3, 3: none, 4: 5, 6: 7, 7: none, 0: none}
    assert found.num_valid == 3


def test_rows_of_several_stores_share_a_microbatch(make_store):
    """As a mixture reads them: a call of the kernel for each store, outputs behind those of the one before."""
    one, other = feeder(make_store([5, 9]), 8), feeder(masked(make_store([4, 6]), np.arange(10) % 2), 8)
    both = [one.microbatch(np.array([1])), other.microbatch(np.array([0]))]
    raw = [one.row(1, dataset=2, position=7), other.row(0, dataset=0, position=8)]
    found = one.collate(raw)
    assert found.dataset_B is not None and found.dataset_B.tolist() == [2, 0]
    assert found.place_B is not None and found.place_B.tolist() == [7, 8]
    assert torch.equal(found.labels_BS, torch.cat([part.labels_BS for part in both]))
    assert found.num_valid == sum(part.num_valid for part in both)
    shape = (2, 8)
    ids, labels, positions = np.empty((3, *shape), dtype=np.int64)
    real = np.empty(shape, dtype=np.bool_)
    bounds, real_lengths = np.empty((2, 17), dtype=np.int32)
    segments = valid = 0
    for row, (fed, index) in enumerate(((one, 1), (other, 0))):
        at = slice(row, row + 1)
        outputs = (ids[at], labels[at], positions[at], real[at], bounds[segments:], real_lengths[segments:])
        more, labelled = lay_rows(np.array([index]), *fed._inputs, 1, longest_padding(1), 8 * row, *outputs)
        segments, valid = segments + more, valid + labelled
    assert (labels == found.labels_BS.numpy()).all() and valid == found.num_valid
    assert bounds[: segments + 1].tolist() == found.cumulative_lengths.tolist()
    assert real_lengths[:segments].tolist() == found.real_lengths.tolist()


@pytest.mark.parametrize("kind", [np.uint16, np.uint32])
def test_tokens_are_read_from_a_file_as_they_are(make_store, tmp_path, kind: type):
    store = make_store([3, 60_000, 5])
    (tmp_path / "tokens.bin").write_bytes(store.tokens.astype(kind).tobytes())
    mapped = np.asarray(np.memmap(tmp_path / "tokens.bin", dtype=kind, mode="r"))
    fed = feeder(TokenStore(**{**_parts(store), "tokens": mapped}), 4000)
    asked = np.arange(fed.rows.num_rows, dtype=np.int64)
    assert_same(fed.microbatch(asked), step_by_step(fed, asked))


def _parts(store: TokenStore) -> dict:
    return {attribute.name: getattr(store, attribute.name) for attribute in fields(TokenStore)}


@pytest.mark.parametrize("align", [1, 6, 100, 2100])
def test_padding_is_cut_alike(make_store, align: int):
    fed = feeder(make_store([3, 700]), 2 * LONGEST_PADDING // align * align + 4200 // align * align, align)
    asked = np.array([PADDING, 0, PADDING])
    assert_same(fed.microbatch(asked), step_by_step(fed, asked))


def test_a_rank_keeps_its_part_of_the_rows(make_store):
    part = shard(ring=2, ulysses=1, ring_rank=1, ulysses_rank=0)
    fed = feeder(make_store([9, 30, 17, 4, 8]), 32, 4, more=[part])
    asked = np.arange(fed.rows.num_rows, dtype=np.int64)
    assert fed.microbatch(asked).positions_BS.shape == (fed.rows.num_rows, 16)
    assert_same(fed.microbatch(asked), step_by_step(fed, asked))


def test_a_chain_with_something_in_between_runs_stage_by_stage(make_store):
    """What a stage of the user's own sees and changes is not passed by."""
    seen = []

    def look(value):
        seen.append(value.num_rows)
        return value

    one, two, three, four = stages(8)
    between = Stage(name="look", takes=two.gives, gives=two.gives, function=look)
    fed = feeder(make_store([5, 9, 3]), 8)
    own = RowFeeder(
        store=fed.store, documents=fed.documents, rows=fed.rows, collate=compose([one, two, between, three, four])
    )
    asked = np.array([1, 0])
    assert_same(own.microbatch(asked), fed.microbatch(asked))
    assert seen == [2]


def test_rows_packed_for_another_capacity_are_refused_by_both_ways(make_store):
    fed = feeder(make_store([9, 9]), 16)
    narrow = RowFeeder(store=fed.store, documents=fed.documents, rows=fed.rows, collate=compose(stages(12)))
    for read in (narrow.microbatch, lambda asked: step_by_step(narrow, asked)):
        with pytest.raises(DataError, match="row 1 needs at least 16 positions, but has 12"):
            read(np.array([PADDING, 0]))


def test_microbatches_keep_what_they_hold(make_store):
    fed = feeder(make_store([5, 9, 3, 8, 8]), 8)
    first = fed.microbatch(np.array([0]))
    before = first.input_ids_BS.clone()
    for row in range(fed.rows.num_rows):
        fed.microbatch(np.array([row]))
    assert torch.equal(first.input_ids_BS, before)
    first.input_ids_BS.zero_()
    assert torch.equal(fed.microbatch(np.array([0])).input_ids_BS, before)


def test_only_the_four_stages_in_their_order_are_taken_for_what_they_are():
    assert compose(stages(8)).lays_out is not None
    one, *rest = stages(8)
    other = Stage(name="to_tensor", takes=one.takes, gives=one.gives, function=lambda rows: one(rows))
    assert CollateChain(stages=(other, *rest)).lays_out is None
