"""Loaders: the same rows per step in every layout, every held-out position once, exact resume."""

import json
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrain.runtime.data.batch import IGNORE_INDEX
from xtrain.runtime.data.collators import compose, flatten, pack, shift_tokens, to_tensor
from xtrain.runtime.data.errors import DataError
from xtrain.runtime.data.loader import EvalLoader, RowLoader
from xtrain.runtime.data.order import RowOrder
from xtrain.runtime.data.packing import Method, pack_rows, pack_sequential
from xtrain.runtime.data.store import TokenStore

CAPACITY = 8
LENGTHS = [int(n) for n in np.random.default_rng(5).integers(2, 25, 40)]
# Odd documents only, so that an index into the choice is never an index into the store.
DOCUMENTS = np.arange(1, len(LENGTHS), 2, dtype=np.int64)
LAYOUTS = [(m, a, r) for m in (1, 2, 3, 4, 6, 12) for a in (1, 2, 3, 4, 6, 12) for r in (1, 2, 3, 4) if m * a * r == 12]


def chain(capacity: int = CAPACITY, align: int = 1):
    return compose([to_tensor(), flatten(), shift_tokens(), pack(capacity=capacity, align=align)])


@pytest.fixture
def store(make_store) -> TokenStore:
    return make_store(LENGTHS)


def loader(
    store: TokenStore,
    *,
    micro: int = 2,
    accumulate: int = 2,
    data_rank: int = 0,
    data_ranks: int = 1,
    seed: int = 0,
    documents: np.ndarray = DOCUMENTS,
    capacity: int = CAPACITY,
    align: int = 1,
    balance: bool = False,
    method: Method = "sequential",
    group: int = 6,
) -> RowLoader:
    rows = pack_rows(store.lengths_of(documents), capacity, "split", align, method=method, group=group)
    return RowLoader(
        store=store,
        documents=documents,
        rows=rows,
        order=RowOrder(rows.num_rows, seed),
        collate=chain(align=align),
        micro=micro,
        accumulate=accumulate,
        data_rank=data_rank,
        data_ranks=data_ranks,
        balance=balance,
    )


def rows_of(batch) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    inputs, labels = batch.input_ids_BS.tolist(), batch.labels_BS.tolist()
    return [(tuple(a), tuple(b)) for a, b in zip(inputs, labels, strict=True)]


def test_there_are_layouts_to_compare():
    assert {ranks for *_, ranks in LAYOUTS} == {1, 2, 3, 4}
    assert len(LAYOUTS) > 10


@pytest.mark.parametrize(("micro", "accumulate", "data_ranks"), LAYOUTS)
def test_every_layout_sees_the_same_rows_in_every_step(micro: int, accumulate: int, data_ranks: int, store: TokenStore):
    reference = loader(store, micro=12, accumulate=1)
    ranks = [
        loader(store, micro=micro, accumulate=accumulate, data_rank=rank, data_ranks=data_ranks)
        for rank in range(data_ranks)
    ]
    for step in (0, 1, 7):
        per_rank = [rank.microbatches(step) for rank in ranks]
        assert all(len(batches) == accumulate for batches in per_rank)
        assert all(batch.input_ids_BS.shape == (micro, CAPACITY) for batches in per_rank for batch in batches)
        # In the order of global positions: microbatch by microbatch, within it rank by rank.
        seen = [row for group in zip(*per_rank, strict=True) for batch in group for row in rows_of(batch)]
        assert seen == rows_of(reference.microbatches(step)[0])


@pytest.mark.parametrize(("micro", "accumulate", "data_ranks"), LAYOUTS)
def test_rows_dealt_by_cost_are_those_of_the_step(micro: int, accumulate: int, data_ranks: int, store: TokenStore):
    reference = loader(store, micro=12, accumulate=1)
    ranks = [
        loader(store, micro=micro, accumulate=accumulate, data_rank=rank, data_ranks=data_ranks, balance=True)
        for rank in range(data_ranks)
    ]
    for step in (0, 1, 7):
        seen = [row for rank in ranks for batch in rank.microbatches(step) for row in rows_of(batch)]
        assert sorted(seen) == sorted(rows_of(reference.microbatches(step)[0]))


def test_an_epoch_trains_on_each_position_of_the_chosen_documents_once(store: TokenStore):
    one = loader(store, micro=1, accumulate=1)
    assert one.rows.num_rows > 20
    seen: Counter[tuple[int, int]] = Counter()
    for step in range(one.rows.num_rows):
        for inputs, labels in rows_of(one.microbatches(step)[0]):
            seen.update((a, b) for a, b in zip(inputs, labels, strict=True) if b != IGNORE_INDEX)
    documents = [store.document(int(index)).tolist() for index in DOCUMENTS]
    expected = Counter(pair for document in documents for pair in pairwise(document))
    assert seen == expected


@given(
    st.sampled_from(["sequential", "multipack", "best_fit"]),
    st.integers(1, 30),
    st.lists(st.tuples(st.integers(1, 5), st.sampled_from(LAYOUTS)), min_size=1, max_size=6),
    st.integers(0, 2**63),
)
@settings(deadline=None, max_examples=25)
def test_a_run_that_moves_between_layouts_sees_every_position_as_often(make_store, method, group, legs, seed):
    """As many steps as there are rows are as many epochs as a step has rows, however ranks change on the way."""
    store = make_store(LENGTHS[:20])
    documents = np.arange(0, 20, 3, dtype=np.int64)
    same = {"method": method, "group": group, "balance": method == "best_fit", "seed": seed, "documents": documents}
    step, seen, state = 0, Counter(), None
    while True:
        for steps, (micro, accumulate, data_ranks) in legs:
            layout = {"micro": micro, "accumulate": accumulate, "data_ranks": data_ranks, **same}
            ranks = [loader(store, data_rank=rank, **layout) for rank in range(data_ranks)]
            for rank in ranks if state else ():
                rank.check_state(state)
            for _ in range(steps):
                if step == ranks[0].rows.num_rows:
                    pairs = [pair for index in documents for pair in pairwise(store.document(int(index)).tolist())]
                    assert seen == dict.fromkeys(pairs, 12)
                    return
                batches = [batch for rank in ranks for batch in rank.microbatches(step)]
                rows = [row for batch in batches for row in rows_of(batch)]
                seen.update(pair for row in rows for pair in zip(*row, strict=True) if pair[1] != IGNORE_INDEX)
                step += 1
            state = json.loads(json.dumps(ranks[-1].state(step)))


@pytest.mark.parametrize("align", [2, 4, 8])
def test_padded_documents_are_trained_on_once_too(align: int, store: TokenStore):
    one = loader(store, micro=1, accumulate=1, align=align)
    seen: Counter[tuple[int, int]] = Counter()
    for step in range(one.rows.num_rows):
        batch = one.microbatches(step)[0]
        lengths = batch.cumulative_lengths.diff()
        assert not (lengths % align).any()
        seen.update((a, b) for row in rows_of(batch) for a, b in zip(*row, strict=True) if b != IGNORE_INDEX)
    documents = [store.document(int(index)).tolist() for index in DOCUMENTS]
    assert seen == Counter(pair for document in documents for pair in pairwise(document))


def test_a_loader_made_ready_reads_nothing_and_changes_nothing(store: TokenStore):
    from attrs import evolve

    empty = evolve(store, tokens=store.tokens[:0])
    ready = loader(empty, balance=True)
    ready.make_ready()
    again = loader(store, balance=True)
    again.make_ready()
    for one, other in zip(again.microbatches(2), loader(store, balance=True).microbatches(2), strict=True):
        assert rows_of(one) == rows_of(other)


def test_a_new_loader_continues_exactly(store: TokenStore):
    first = loader(store)
    for step in range(9):
        first.microbatches(step)
    resumed = loader(store)
    state = json.loads(json.dumps(first.state(9)))
    resumed.check_state(state)
    for a, b in zip(first.microbatches(9), resumed.microbatches(state["step"]), strict=True):
        assert rows_of(a) == rows_of(b)


def test_a_state_holds_on_another_layout_of_as_many_rows(store: TokenStore):
    loader(store, micro=1, accumulate=1, data_ranks=4, data_rank=3).check_state(loader(store).state(3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"micro": 4}, r"rows in an optimizer step .*: 4 in the checkpoint, 8 now"),
        ({"seed": 1}, r"seed of the row order: 0 in the checkpoint, 1 now"),
        ({"capacity": 7}, r"number of packed rows: (.|\n)*positions in a row: 8 in the checkpoint, 7 now"),
        ({"align": 2}, r"multiple of positions that documents are padded to: 1 in the checkpoint, 2 now"),
        ({"documents": DOCUMENTS - 1}, r"content of the rows"),
        ({"documents": DOCUMENTS[:-3]}, r"number of packed rows"),
        ({"method": "multipack", "group": 20}, r"content of the rows"),
    ],
)
def test_a_state_of_other_data_is_refused_with_the_difference(change: dict, message: str, store: TokenStore):
    with pytest.raises(DataError, match=message):
        loader(store, **change).check_state(loader(store).state(3))


def test_the_same_numbers_from_another_store_are_refused(store: TokenStore):
    from attrs import evolve

    with pytest.raises(DataError, match="content of the rows") as caught:
        loader(evolve(store, key="other")).check_state(loader(store).state(3))
    assert "number of packed rows" not in str(caught.value)


def test_other_documents_that_pack_alike_are_refused(make_store):
    alike = make_store([6] * len(LENGTHS))
    with pytest.raises(DataError, match="content of the rows"):
        loader(alike, documents=DOCUMENTS - 1).check_state(loader(alike).state(3))


def test_an_incomplete_state_is_refused(store: TokenStore):
    with pytest.raises(DataError, match="missing in the checkpoint"):
        loader(store).check_state({"step": 3})


def eval_ranks(store: TokenStore, data_ranks: int, micro: int, max_rows: int | None = None) -> list[EvalLoader]:
    rows = pack_sequential(store.lengths()[DOCUMENTS], CAPACITY, "split")
    return [
        EvalLoader(
            store=store,
            documents=DOCUMENTS,
            rows=rows,
            collate=chain(),
            micro=micro,
            data_rank=rank,
            data_ranks=data_ranks,
            max_rows=max_rows,
        )
        for rank in range(data_ranks)
    ]


@pytest.mark.parametrize("micro", [1, 2, 5])
@pytest.mark.parametrize("data_ranks", [1, 2, 3, 4])
def test_evaluation_covers_every_position_once_on_any_number_of_ranks(data_ranks: int, micro: int, store: TokenStore):
    ranks = eval_ranks(store, data_ranks, micro)
    per_rank = [list(rank) for rank in ranks]
    assert {len(batches) for batches in per_rank} == {len(ranks[0])}
    assert {batch.input_ids_BS.shape for batches in per_rank for batch in batches} == {(micro, CAPACITY)}
    seen = Counter(
        pair
        for batches in per_rank
        for batch in batches
        for inputs, labels in rows_of(batch)
        for pair in zip(inputs, labels, strict=True)
        if pair[1] != IGNORE_INDEX
    )
    documents = [store.document(int(index)).tolist() for index in DOCUMENTS]
    assert seen == Counter(pair for document in documents for pair in pairwise(document))
    assert sum(batch.num_valid for batches in per_rank for batch in batches) == seen.total()


@pytest.mark.parametrize(("data_ranks", "micro"), [(1, 1), (1, 4), (2, 2), (3, 2), (4, 4)])
def test_a_limit_takes_the_same_rows_in_every_layout(store: TokenStore, data_ranks: int, micro: int):
    def seen(ranks: list[EvalLoader]) -> Counter:
        rows = (row for rank in ranks for batch in rank for row in rows_of(batch))
        return Counter(row for row in rows if set(row[1]) != {IGNORE_INDEX})

    limited = eval_ranks(store, data_ranks, micro, max_rows=7)
    assert len({len(rank) for rank in limited}) == 1
    reference = eval_ranks(store, 1, 1, max_rows=7)
    assert seen(limited) == seen(reference) and len(reference[0]) == 7
    assert len(list(eval_ranks(store, 1, 2, max_rows=10**6)[0])) == len(eval_ranks(store, 1, 2)[0])


def test_no_rows_give_no_batches(store: TokenStore):
    empty = np.empty(0, dtype=np.int64)
    rows = pack_sequential(empty, CAPACITY, "split")
    evaluation = EvalLoader(
        store=store, documents=empty, rows=rows, collate=chain(), micro=2, data_rank=0, data_ranks=1
    )
    assert list(evaluation) == []
