"""Losses of rewards against what TRL makes of the same numbers, and which tokens rewards are read at."""

import json
from pathlib import Path

import pytest
import torch
from attrs import evolve

from xtrain.components.collators.pack_torch import pack
from xtrain.components.collators.user_part_torch import join_rows, split_rows
from xtrain.components.losses.bradley_terry_torch import ranked
from xtrain.components.losses.regression_torch import squared
from xtrain.runtime.feed.collate import local_part
from xtrain.runtime.feed.microbatch import Sample, Samples, Units
from xtrain.runtime.nn.axes import Axes
from xtrain.runtime.nn.unit_losses import reward_losses, rewards, row_losses

VECTORS = json.loads((Path(__file__).parents[1] / "support" / "loss_vectors.json").read_text())["reward"]
TERMS = {"plain": ranked(), "margin": ranked(margin=True), "centred": ranked(margin=True, centre=0.01)}


def units_of(count: int, values: dict[str, torch.Tensor]) -> Units:
    """Pairs whose sides are segments of one token each, all chosen ones first."""
    return Units(
        segment_BS=torch.arange(2 * count)[None],
        tokens_N=torch.ones(2 * count, dtype=torch.int64),
        last_N=torch.arange(2 * count),
        members_KU=torch.arange(2 * count).view(2, count),
        values=values,
    )


@pytest.mark.parametrize("name", TERMS)
def test_bradley_terry_is_that_of_trl(name: str):
    given, expected = VECTORS["inputs"], VECTORS[name]
    reward_N = torch.tensor(given["chosen"] + given["rejected"], dtype=torch.float64, requires_grad=True)
    units = units_of(3, {"margin": torch.tensor(given["margins"], dtype=torch.float64)})
    objective, recorded, _ = reward_losses(reward_N, TERMS[name], units, Axes(), torch.float64)
    (objective / 3).backward()
    assert objective.item() / 3 == pytest.approx(expected["loss"], rel=1e-12)
    assert reward_N.grad is not None
    assert reward_N.grad.tolist() == pytest.approx(expected["grad_chosen"] + expected["grad_rejected"], rel=1e-12)
    means = dict(zip(("loss", *TERMS[name].metrics), (recorded / 3).tolist(), strict=True))
    assert means["loss"] == objective.item() / 3
    assert means["rewards/accuracy"] == pytest.approx(expected["accuracy"], rel=1e-6)  # theirs is in fp32
    assert means["rewards/margin"] == pytest.approx(expected["margin"], rel=1e-12)
    both = (means["rewards/chosen"] + means["rewards/rejected"]) / 2
    assert both == pytest.approx(expected["mean_reward"], rel=1e-12)


def test_regression_is_the_squared_error():
    reward_N = torch.tensor([1.0, -0.5], dtype=torch.float64)
    units = evolve(units_of(1, {"reward": torch.tensor([0.5, 0.5]).double()}), members_KU=torch.tensor([[0, 1]]))
    _, recorded, loss_U = reward_losses(reward_N, squared(), units, Axes(), torch.float64)
    assert loss_U.tolist() == [0.25, 1.0]
    assert recorded.tolist() == [1.25, 0.5, 1.5]  # sums of losses, of rewards, and of distances


LENGTHS = ((5, 3), (4, 1))  # of the sides of pairs, in one row each


def rows():
    samples = []
    for row, sides in enumerate(LENGTHS):
        for side, length in enumerate(sides):
            tokens = torch.arange(length) + 10 * (2 * row + side)
            samples.append(Sample(row=row, tokens=tokens, labels=tokens + 1, side=side))
    return pack(capacity=16, align=8, unit="pair").function(Samples(num_rows=2, samples=tuple(samples)))


def test_rewards_are_read_at_the_last_token_of_each_segment():
    """Padding behind a document is of its segment, and no token."""
    whole = rows()
    assert whole.units is not None and whole.input_ids_BS is not None
    assert [whole.input_ids_BS.flatten()[at].item() for at in whole.units.last_N] == [4, 12, 23, 30]
    again = join_rows(split_rows(whole))
    assert again.units is not None and torch.equal(again.units.last_N, whole.units.last_N)
    x_BSD = torch.nn.functional.one_hot(whole.input_ids_BS, 40).double()
    weight_1D = torch.arange(40.0).double()[None]
    found_N = rewards(x_BSD, torch.nn.Identity(), weight_1D, whole.units, 16, Axes())
    assert found_N.tolist() == [4.0, 12.0, 23.0, 30.0]


def test_every_last_token_lies_on_one_rank_of_a_row():
    whole = rows()
    parts = [local_part(whole, 2, 2, ring, ulysses) for ring in range(2) for ulysses in range(2)]
    found: dict[int, list[int]] = {}
    for part in parts:
        assert part.units is not None and part.input_ids_BS is not None
        for segment, at in enumerate(part.units.last_N.tolist()):
            if at >= 0:
                found.setdefault(segment, []).append(int(part.input_ids_BS.flatten()[at]))
    assert found == {0: [4], 1: [12], 2: [23], 3: [30]}


def test_losses_of_a_mixture_are_those_of_their_rows():
    whole = rows()
    assert whole.units is not None
    loss_U = torch.tensor([0.5, 2.0], dtype=torch.float64)
    of_rows = row_losses(loss_U, whole.units, torch.tensor([1, 0]), 16)
    assert of_rows.cross_entropy_B.tolist() == [0.5, 2.0] and of_rows.valid_B.tolist() == [1.0, 1.0]
    parts = [local_part(whole, 2, 1, ring, 0) for ring in range(2)]
    sums = [row_losses(loss_U, part.units, torch.tensor([1, 0]), 8) for part in parts if part.units is not None]
    assert sum(each.cross_entropy_B for each in sums).tolist() == [0.5, 2.0]
    assert sum(each.valid_B for each in sums).tolist() == [1.0, 1.0]
