"""Losses of the datasets of a mixture: sums of their own tokens, over rows, microbatches and ranks."""

import math

import pytest
import torch
from one_rank import one_rank
from ranks import on_ranks

from xtrain.runtime.base.state import Rank
from xtrain.runtime.feed.microbatch import IGNORE_INDEX
from xtrain.runtime.loop.metrics import DatasetLosses
from xtrain.runtime.nn.batch import RowLosses

ROWS, POSITIONS = 4, 6


def rank(number: int = 0, world: int = 1, tp: int = 0) -> Rank:
    return one_rank(number, world_size=world, data_rank=number, data_ranks=world, coordinates={"tp": tp})


def batch(seed: int, datasets: list[int]) -> RowLosses:
    """Random losses; about half of the positions have a label, none of the last row has."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 9, (len(datasets), POSITIONS), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.5] = IGNORE_INDEX
    labels[-1] = IGNORE_INDEX
    each = torch.rand(labels.shape, dtype=torch.float64, generator=generator) * (labels != IGNORE_INDEX)
    return RowLosses.of(torch.tensor(datasets), labels, each.flatten())


def expected(names: str, batches: list[RowLosses]) -> dict[str, float]:
    rows = [row for b in batches for row in zip(b.dataset_B, b.cross_entropy_B, b.valid_B, strict=True)]
    found = {}
    for number, name in enumerate(names):
        own = [(float(loss), int(valid)) for dataset, loss, valid in rows if dataset == number]
        if tokens := sum(valid for _, valid in own):
            found[f"loss/{name}"] = math.fsum(loss for loss, _ in own) / tokens
            found[f"valid_tokens/{name}"] = tokens
    return found


def test_rows_are_summed_over_their_valid_tokens():
    labels = torch.tensor([[1, IGNORE_INDEX, 2], [IGNORE_INDEX] * 3])
    rows = RowLosses.of(torch.tensor([1, 0]), labels, torch.tensor([0.5, 0.0, 2.0, 0.0, 0.0, 0.0]))
    assert rows.cross_entropy_B.tolist() == [2.5, 0.0] and rows.valid_B.tolist() == [2.0, 0.0]
    assert rows.cross_entropy_B.dtype == torch.float64


def test_every_dataset_has_the_mean_of_its_own_tokens():
    losses = DatasetLosses("abc", rank())
    batches = [batch(0, [2, 0, 0, 1]), batch(1, [0, 0, 2, 0]), batch(2, [2, 2, 0, 2])]
    losses.add(batches[:1])
    losses.add(batches[1:])
    found = losses.take()
    assert found == pytest.approx(expected("abc", batches), rel=1e-14)
    assert set(found) == {"loss/a", "loss/c", "valid_tokens/a", "valid_tokens/c"}, "b had no valid token"


def test_a_window_begins_anew():
    losses = DatasetLosses("ab", rank())
    losses.add([batch(0, [0, 1, 0, 0])])
    losses.clear()
    losses.add([batch(1, [0, 0, 0, 0])])
    assert losses.take() == pytest.approx(expected("ab", [batch(1, [0, 0, 0, 0])]), rel=1e-14)
    assert losses.take() == {}


def test_of_one_dataset_there_is_nothing_to_say():
    losses = DatasetLosses("a", rank())
    losses.add([batch(0, [0, 0, 0, 0])])
    assert losses.take() == {}


def test_what_is_no_number_stays_with_its_dataset():
    rows = RowLosses.of(torch.tensor([0, 1]), torch.ones(2, 2, dtype=torch.int64), torch.tensor([math.inf, 1, 2, 3]))
    losses = DatasetLosses("ab", rank())
    losses.add([rows])
    assert losses.take() == {"loss/a": math.inf, "loss/b": 2.5, "valid_tokens/a": 2, "valid_tokens/b": 2}


def test_rows_without_tokens_are_of_no_dataset():
    losses = DatasetLosses("ab", rank())
    losses.add([batch(0, [0, -1, 1, -1])])
    assert losses.take() == pytest.approx(expected("ab", [batch(0, [0, -1, 1, -1])]), rel=1e-14)


def on_rank(number: int, world: int):
    """The last rank is a tensor-parallel peer of the one before it: it holds the same rows, which count once."""
    losses = DatasetLosses("abc", rank(number, world, tp=number == world - 1))
    losses.add([batch(min(number, world - 2), [number % 2, 0, 2, 1])])
    return losses.take()


def test_ranks_add_up(tmp_path):
    found = on_ranks(3, on_rank, tmp_path)
    assert found[0] == found[1] == found[2]
    assert found[0] == pytest.approx(expected("abc", [batch(0, [0, 0, 2, 1]), batch(1, [1, 0, 2, 1])]), rel=1e-14)
