"""Attention over rows that lie on several ranks, against attention over whole rows."""

import pytest
import torch
from context_ranks import CASES, WORLD, Case, measure, microbatch
from ranks import on_ranks

from xtrain.runtime.nn.batch import DocumentLayout
from xtrain.runtime.nn.blockwise import BlockLayout

TOLERANCE = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 2e-2}


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> list[dict[str, dict[str, float]]]:
    """By rank. All cases share one start of the ranks: that is what takes time."""
    return on_ranks(WORLD, measure, tmp_path_factory.mktemp("ranks"))


@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_ranks_together_compute_attention_over_whole_rows(case: Case, measured):
    ranks = [rank[case.name] for rank in measured if case.name in rank]
    assert len(ranks) == case.ring * case.ulysses
    names = {"out"} if case.mode == "without gradient" else {"out", "q", "k", "v", *(["sink"] if case.sinks else [])}
    for rank, errors in enumerate(ranks):
        assert errors.keys() == names
        assert max(errors.values()) < TOLERANCE[case.dtype], f"rank {rank}: {errors}"


def packing_of(case: Case) -> DocumentLayout:
    batch = microbatch(case)
    rows, sequence = batch.positions_BS.shape
    return DocumentLayout.from_lengths(batch.cumulative_lengths, rows, sequence, torch.device("cpu"))


def test_segments_of_one_length_are_one_batch():
    layout = BlockLayout.of(packing_of(Case(name="", ring=2, rows=((1, 3, 1, 3), (8,)))), 2)
    # Local lengths are halves of 4, 12, 4, 12 and 32 positions; batches are (first, segments, length).
    assert layout.batches == ((0, 2, 2), (4, 2, 6), (16, 1, 16))
    x_BHSA = torch.arange(32.0).view(2, 1, 16, 1)
    sorted_T = layout.sort(x_BHSA).flatten().tolist()
    assert sorted_T == [0, 1, 8, 9, *range(2, 8), *range(10, 16), *range(16, 32)]
    assert torch.equal(layout.unsort(layout.sort(x_BHSA)), x_BHSA)


def test_rows_in_order_are_not_moved():
    layout = BlockLayout.of(packing_of(Case(name="", ring=2, rows=((4,), (4,)))), 2)
    assert layout.order is None and layout.batches == ((0, 2, 8),)
    x_BHSA = torch.randn(2, 3, 8, 5)
    assert torch.equal(layout.unsort(layout.sort(x_BHSA)), x_BHSA)


def test_all_layers_share_a_layout_that_goes_with_its_microbatch():
    from xtrain.runtime.nn.blockwise import _LAYOUTS

    packing = packing_of(Case(name="", ring=2))
    assert BlockLayout.of(packing, 2) is BlockLayout.of(packing, 2)
    assert BlockLayout.of(packing, 2) is not BlockLayout.of(packing, 1)
    before = len(_LAYOUTS)
    del packing
    assert len(_LAYOUTS) == before - 1
