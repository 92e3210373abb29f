"""Loaders: the same rows per step in every layout, every held-out position once, exact resume."""

import json
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from attrs import evolve, fields
from examples import drawn
from hypothesis import given
from hypothesis import strategies as st

from xtrain.components.collators.flatten_torch import flatten
from xtrain.components.collators.pack_torch import pack
from xtrain.components.collators.shift_tokens_torch import shift_tokens
from xtrain.components.collators.to_tensor_torch import to_tensor
from xtrain.components.packings.sequential_run import pack as pack_sequential
from xtrain.plan.plan import PlanPhase
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.collate import compose
from xtrain.runtime.feed.curriculum import Curriculum, Remarks, TrainingRows
from xtrain.runtime.feed.loader import EvalLoader, RowLoader
from xtrain.runtime.feed.microbatch import IGNORE_INDEX
from xtrain.runtime.feed.packing.rows import pack_rows
from xtrain.runtime.feed.packing.stored_rows import RowReader
from xtrain.runtime.feed.token_store import TokenStore

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
    method: str = "sequential",
    group: int = 6,
    name: str = "one",
) -> RowLoader:
    rows = pack_rows(store.lengths_of(documents), capacity, "split", align, method=method, group=group)
    reader = RowReader(store=store, documents=documents, rows=rows)
    return over(
        {name: reader},
        micro=micro,
        accumulate=accumulate,
        data_rank=data_rank,
        data_ranks=data_ranks,
        seed=seed,
        align=align,
        balance=balance,
    )


def over(
    readers: dict[str, RowReader],
    *,
    phases: tuple[PlanPhase, ...] = (),
    micro: int = 2,
    accumulate: int = 2,
    data_rank: int = 0,
    data_ranks: int = 1,
    seed: int = 0,
    align: int = 1,
    balance: bool = False,
    steps: int = 1000,
) -> RowLoader:
    """A loader over several datasets, by default with equal shares."""
    return RowLoader(
        datasets=tuple(TrainingRows.of(name, reader, seed) for name, reader in readers.items()),
        curriculum=Curriculum(datasets=tuple(readers),
            phases=phases or (PlanPhase(name="train", first=0, fraction=None, shares=dict.fromkeys(readers, 1.0)),),
            steps=steps, rows_per_step=micro * accumulate * data_ranks, seed=seed,
            num_rows={name: reader.rows.num_rows for name, reader in readers.items()}),
        collate=chain(align=align),
        micro=micro,
        accumulate=accumulate,
        data_rank=data_rank,
        data_ranks=data_ranks,
        balance=balance,
    )  # fmt: skip


def rows_in(one: RowLoader) -> int:
    """Packed rows of the only dataset."""
    (dataset,) = one.datasets
    return dataset.order.num_rows


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
    assert rows_in(one) > 20
    seen: Counter[tuple[int, int]] = Counter()
    for step in range(rows_in(one)):
        for inputs, labels in rows_of(one.microbatches(step)[0]):
            seen.update((a, b) for a, b in zip(inputs, labels, strict=True) if b != IGNORE_INDEX)
    documents = [store.document(int(index)).tolist() for index in DOCUMENTS]
    expected = Counter(pair for document in documents for pair in pairwise(document))
    assert seen == expected


ANY_LAYOUT = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4))


@given(
    st.sampled_from(["sequential", "multipack", "best_fit"]),
    st.integers(1, 30),
    st.lists(st.tuples(st.integers(1, 5), ANY_LAYOUT), min_size=1, max_size=6),
    st.integers(0, 2**63),
)
@drawn(12, 250)
def test_a_run_that_moves_between_layouts_sees_every_row_once_an_epoch(make_store, method, group, legs, seed):
    """However many rows a step has on the way, and whoever takes them."""
    store = make_store(LENGTHS[:20])
    documents = np.arange(0, 20, 3, dtype=np.int64)
    same = {"method": method, "group": group, "balance": method == "best_fit", "seed": seed, "documents": documents}
    expected = Counter(pair for index in documents for pair in pairwise(store.document(int(index)).tolist()))
    step, taken, state = 0, [], None
    while True:
        for steps, (micro, accumulate, data_ranks) in legs:
            layout = {"micro": micro, "accumulate": accumulate, "data_ranks": data_ranks, **same}
            ranks = [loader(store, data_rank=rank, **layout) for rank in range(data_ranks)]
            for rank in ranks if state else ():
                rank.restore(state, 1000)
            for _ in range(steps):
                batches = [batch for rank in ranks for batch in rank.microbatches(step)]
                placed = [
                    pair for batch in batches for pair in zip(batch.place_B.tolist(), rows_of(batch), strict=True)
                ]
                assert sorted(place for place, _ in placed) == list(range(len(taken), len(taken) + len(placed)))
                taken += [row for _, row in sorted(placed, key=lambda pair: pair[0])]
                step += 1
                if len(taken) > 3 * (epoch := rows_in(ranks[0])):
                    for first in (0, epoch, 2 * epoch):
                        rows = taken[first : first + epoch]
                        seen = (pair for row in rows for pair in zip(*row, strict=True))
                        assert Counter(pair for pair in seen if pair[1] != IGNORE_INDEX) == expected
                    return
            state = json.loads(json.dumps(ranks[-1].state(step)))


@pytest.mark.parametrize("align", [2, 4, 8])
def test_padded_documents_are_trained_on_once_too(align: int, store: TokenStore):
    one = loader(store, micro=1, accumulate=1, align=align)
    seen: Counter[tuple[int, int]] = Counter()
    for step in range(rows_in(one)):
        batch = one.microbatches(step)[0]
        lengths = batch.cumulative_lengths.diff()
        assert not (lengths % align).any()
        seen.update((a, b) for row in rows_of(batch) for a, b in zip(*row, strict=True) if b != IGNORE_INDEX)
    documents = [store.document(int(index)).tolist() for index in DOCUMENTS]
    assert seen == Counter(pair for document in documents for pair in pairwise(document))


def test_a_loader_made_ready_reads_nothing_and_changes_nothing(store: TokenStore):
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
    assert resumed.restore(state, 1000) == Remarks(new=(), renamed={}, left={})
    for a, b in zip(first.microbatches(9), resumed.microbatches(state["step"]), strict=True):
        assert rows_of(a) == rows_of(b)
    assert resumed.state(9) == first.state(9) and resumed.state(12) == first.state(12)


def test_a_state_holds_on_another_layout(store: TokenStore):
    moved = loader(store, micro=1, accumulate=1, data_ranks=3, data_rank=2)
    moved.restore(loader(store).state(3), 1000)
    assert moved.rows_taken(3) == {"one": 12} and moved.rows_taken(5) == {"one": 18}


@pytest.mark.parametrize(("change", "message"), [
    ({"seed": 1}, r"seed of the row order: 0 in the checkpoint, 1 now"),
    ({"capacity": 7}, r"positions in a row: 8 in the checkpoint, 7 now(.|\n)*dataset one, number of packed rows: "),
    ({"align": 2}, r"alignment of documents in positions: 1 in the checkpoint, 2 now"),
    ({"documents": DOCUMENTS - 1}, r"dataset one, content of the rows"),
    ({"documents": DOCUMENTS[:-3]}, r"dataset one, number of packed rows"),
    ({"method": "multipack", "group": 20}, r"content of the rows"),
])  # fmt: skip
def test_a_state_of_other_data_is_refused_with_the_difference(change: dict, message: str, store: TokenStore):
    other = loader(store, **change)
    before = other.curriculum
    with pytest.raises(DataError, match=message):
        other.restore(loader(store).state(3), 1000)
    assert other.curriculum is before


def test_the_same_numbers_from_another_store_are_refused(store: TokenStore):
    with pytest.raises(DataError, match="content of the rows") as caught:
        loader(evolve(store, key="other")).restore(loader(store).state(3), 1000)
    assert "number of packed rows" not in str(caught.value)


def test_a_state_under_another_name_of_the_same_data_is_gone_on_from(store: TokenStore):
    """Earlier versions had two names for one data set, and a checkpoint says the one that its data then had."""
    old = loader(evolve(store, key="old"), name="before").state(3)
    now = loader(evolve(store, aliases=("older", "old")))
    assert now.restore(old, 1000).renamed == {"before": "one"}
    assert now.rows_taken(3) == {"one": 12} and now.state(3)["datasets"] == loader(store).state(3)["datasets"]
    with pytest.raises(DataError, match="content of the rows"):
        loader(evolve(store, aliases=("older",))).restore(loader(evolve(store, key="old")).state(3), 1000)


def test_other_documents_that_pack_alike_are_refused(make_store):
    alike = make_store([6] * len(LENGTHS))
    with pytest.raises(DataError, match="content of the rows"):
        loader(alike, documents=DOCUMENTS - 1).restore(loader(alike).state(3), 1000)


@pytest.mark.parametrize("state", [{"step": 3}, {"step": 3, "format": 1}, {"format": 99}])
def test_a_state_of_another_format_is_refused(store: TokenStore, state: dict):
    with pytest.raises(DataError, match="the data cannot be resumed"):
        loader(store).restore(state, 1000)


def test_a_dataset_that_is_called_otherwise_goes_on_where_it_was(store: TokenStore):
    state = loader(store, name="old").state(5)
    renamed = loader(store, name="new")
    remarks = renamed.restore(state, 1000)
    assert remarks.renamed == {"old": "new"} and not remarks.new and not remarks.left
    assert renamed.rows_taken(5) == {"new": 20}
    assert "dataset new was called old before" in remarks.in_words()[0]


@pytest.fixture
def readers(make_store) -> dict[str, RowReader]:
    """Three datasets whose rows differ in number and in every token."""
    by_name = {}
    for number, name in enumerate(("web", "code", "chat")):
        lengths = LENGTHS[number * 9 : number * 9 + 12]
        store = make_store(lengths)
        store = TokenStore(**{**parts_of(store), "key": name, "tokens": store.tokens + 10_000 * (number + 1)})
        documents = np.arange(len(lengths), dtype=np.int64)
        rows = pack_rows(store.lengths_of(documents), CAPACITY, "split", method="sequential", group=1)
        by_name[name] = RowReader(store=store, documents=documents, rows=rows)
    return by_name


def parts_of(store: TokenStore) -> dict:
    return {attribute.name: getattr(store, attribute.name) for attribute in fields(TokenStore)}


MIX = (
    PlanPhase(name="one", first=0, fraction=None, shares={"web": 0.5, "code": 0.5, "chat": 0.0}),
    PlanPhase(name="two", first=4, fraction=None, shares={"web": 0.1, "code": 0.3, "chat": 0.6}),
    PlanPhase(name="three", first=9, fraction=None, shares={"web": 0.0, "code": 0.0, "chat": 1.0}),
)


@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize(("micro", "accumulate", "data_ranks"), LAYOUTS[::3])
def test_rows_of_a_mixture_are_those_of_the_step_in_every_layout(micro, accumulate, data_ranks, balance, readers):
    reference = over(readers, phases=MIX, micro=12, accumulate=1)
    ranks = [over(
        readers, phases=MIX, micro=micro, accumulate=accumulate, data_rank=rank, data_ranks=data_ranks, balance=balance,
    ) for rank in range(data_ranks)]  # fmt: skip

    def entries(batches) -> list:
        return sorted(
            entry
            for batch in batches
            for entry in zip(batch.place_B.tolist(), batch.dataset_B.tolist(), rows_of(batch), strict=True)
        )

    for step in (0, 3, 4, 9):
        whole = entries(reference.microbatches(step))
        assert whole == entries(batch for rank in ranks for batch in rank.microbatches(step))
        for _, dataset, (inputs, _) in whole:
            assert {token // 10_000 for token in inputs if token} <= {dataset + 1}
        assert {dataset for _, dataset, _ in whole} == {0: {0, 1}, 3: {0, 1}, 4: {0, 1, 2}, 9: {2}}[step]


def test_a_mixture_through_the_stages_is_the_one_laid_out_at_once(readers):
    """A chain with something in between sees each row with its dataset and its place."""
    from xtrain.runtime.feed.collate import Stage

    plain = over(readers, phases=MIX, micro=6, accumulate=1)
    one, *rest = chain().stages
    look = Stage(name="look", takes=one.gives, gives=one.gives, function=lambda rows: rows)
    slow = evolve(plain, collate=compose([one, look, *rest]))
    for step in (0, 5, 9):
        for found, expected in zip(slow.microbatches(step), plain.microbatches(step), strict=True):
            assert_same(found, expected)


def assert_same(found, expected) -> None:
    for name in (attribute.name for attribute in fields(type(expected))):
        one, other = getattr(found, name), getattr(expected, name)
        assert torch.equal(one, other) if isinstance(other, torch.Tensor) else one == other, name


def test_every_dataset_of_a_mixture_is_seen_whole_before_any_of_it_again(readers):
    loader = over(readers, micro=3, accumulate=2)
    seen = {name: [] for name in readers}
    for step in range(30):
        taken = loader.step_rows(step)
        for dataset, row in zip(taken.datasets.ravel().tolist(), taken.rows.ravel().tolist(), strict=True):
            seen[loader.datasets[dataset].name].append(row)
    for dataset in loader.datasets:
        rows, epoch = seen[dataset.name], dataset.order.num_rows
        assert len(rows) > epoch
        for first in range(0, len(rows) - epoch, epoch):
            assert sorted(rows[first : first + epoch]) == list(range(epoch))


def test_a_dataset_that_comes_and_goes_keeps_its_place(readers):
    def on(*names: str) -> RowLoader:
        return over({name: readers[name] for name in names})

    first = on("web", "code")
    taken = first.rows_taken(6)
    second = on("web", "chat")
    remarks = second.restore(json.loads(json.dumps(first.state(6))), 1000)
    assert remarks.new == ("chat",) and list(remarks.left) == ["code"]
    assert [line.split(" ")[1] for line in remarks.in_words()] == ["chat", "code"]
    assert second.rows_taken(6) == {"web": taken["web"], "chat": 0}
    third = on("code", "web")
    remarks = third.restore(json.loads(json.dumps(second.state(9))), 1000)
    assert third.rows_taken(9)["code"] == taken["code"]
    assert remarks.new == () and list(remarks.left) == ["chat"]
    assert third.curriculum.rows_before(9) == 36


def by_passes(**passes: float) -> tuple[PlanPhase, ...]:
    return (PlanPhase(name="train", first=0, fraction=None, shares={}, passes=passes),)


def taken_in(loader: RowLoader, first: int, end: int) -> Counter[tuple[int, int]]:
    """(dataset, row) of all rows of some steps, with how often they were taken."""
    steps = [loader.step_rows(step) for step in range(first, end)]
    return Counter(
        pair for each in steps for pair in zip(each.datasets.ravel().tolist(), each.rows.ravel().tolist(), strict=True)
    )


def test_an_epoch_of_weights_in_epochs_comes_out_even_over_a_stop_and_new_names(readers):
    often = {"web": 1, "code": 3, "chat": 2}
    first = over(readers, phases=by_passes(**often), micro=1, accumulate=1)
    state = json.loads(json.dumps(first.state(7)))
    assert state["passes"] == [["web", 1], ["code", 3], ["chat", 2]]
    renamed = {"pages": readers["web"], "code": readers["code"], "talk": readers["chat"]}
    second = over(renamed, phases=by_passes(pages=1, code=3, talk=2), micro=1, accumulate=1)
    assert second.restore(state, 1000).renamed == {"web": "pages", "chat": "talk"}
    counts = [dataset.order.num_rows for dataset in first.datasets]
    end = sum(times * rows for times, rows in zip(often.values(), counts, strict=True))
    assert taken_in(first, 0, 7) + taken_in(second, 7, end) == {
        (number, row): times for number, times in enumerate(often.values()) for row in range(counts[number])
    }


def test_a_state_of_shares_says_nothing_of_epochs(readers):
    assert "passes" not in over(readers).state(6)


def test_a_dataset_of_the_same_name_with_other_rows_is_refused(readers):
    state = over(readers).state(6)
    with pytest.raises(DataError, match="dataset web, content of the rows") as caught:
        over({**readers, "web": readers["code"]}).restore(state, 1000)
    assert "dataset chat" not in str(caught.value)


def eval_ranks(store: TokenStore, data_ranks: int, micro: int, max_rows: int | None = None) -> list[EvalLoader]:
    rows = pack_sequential(store.lengths()[DOCUMENTS], CAPACITY, "split")
    return [EvalLoader(
        store=store,
        documents=DOCUMENTS,
        rows=rows,
        collate=chain(),
        micro=micro,
        data_rank=rank,
        data_ranks=data_ranks,
        max_rows=max_rows,
    ) for rank in range(data_ranks)]  # fmt: skip


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
