"""Noise on embeddings is the same on every layout, of the size that was asked for, and none in evaluation."""

import math

import pytest
import torch
from attrs import evolve
from topologies import ZBV, Topology
from trials import TOLERANCE, Laboratory, gaps

from xtrain.runtime.nn.layers import EmbeddingNoise, token_keys

NOISE = ("batch.neftune=8",)
ROWS = [
    (Topology(tp=2), ()),
    (Topology(tp=2, fsdp=2), pytest.mark.matrix),
    (Topology(tp=2, sets=("parallel.tp.sequence=false",), note="without sequence"), pytest.mark.matrix),
    (Topology(ring=2), pytest.mark.matrix),
    (Topology(pp=2, ulysses=2), pytest.mark.matrix),
    (Topology(pp=2, sets=ZBV, note="zbv"), pytest.mark.matrix),
    (Topology(fsdp=4), pytest.mark.matrix),
]


@pytest.mark.parametrize("topology", [pytest.param(row, id=row.name, marks=marks) for row, marks in ROWS])
def test_a_layout_adds_the_noise_that_one_process_adds(lab: Laboratory, topology: Topology):
    trial = topology.trial("fp64", shallow=True)
    noisy = evolve(trial, settings=(*trial.settings, *NOISE))
    alone = lab.alone(noisy)
    found, limit = gaps(lab.run(noisy, topology.layout, saves=False), alone), TOLERANCE["fp64"]
    assert not found.beyond(limit)
    # It is there: the first step has another loss than without.
    plain = lab.alone(trial)
    assert abs(alone.curve[0][1] / plain.curve[0][1] - 1) > 1e-6


def test_noise_is_even_up_to_its_size_and_other_for_every_token():
    noise = EmbeddingNoise.of(0.25, seed=3)
    place_B, columns_S = torch.tensor([5, 6]), torch.arange(64)
    keys_BS = token_keys(place_B, columns_S)
    x_BSD = noise.add(torch.zeros(2, 64, 128, dtype=torch.float64), keys_BS)
    assert x_BSD.abs().max() <= 0.25 and x_BSD.abs().max() > 0.2499
    assert x_BSD.std().item() == pytest.approx(0.25 / math.sqrt(3), rel=0.02) and abs(x_BSD.mean()) < 0.01
    assert len(torch.unique(x_BSD)) > 0.99 * x_BSD.numel()
    # A part of the positions gets what they get among all.
    part = noise.add(torch.zeros(2, 10, 128, dtype=torch.float64), keys_BS[:, 20:30])
    assert torch.equal(part, x_BSD[:, 20:30])
    other = EmbeddingNoise.of(0.25, seed=4).add(torch.zeros(2, 64, 128, dtype=torch.float64), keys_BS)
    assert not torch.equal(other, x_BSD)


def test_gradients_pass_as_if_there_were_no_noise():
    keys_BS = token_keys(torch.tensor([1]), torch.arange(4))
    table = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    x_BSD = EmbeddingNoise.of(0.5, seed=0).add(
        torch.nn.functional.embedding(torch.tensor([[1, 2, 1, 6]]), table), keys_BS
    )
    (x_BSD * 2).sum().backward()
    assert table.grad is not None and table.grad[1].tolist() == [4, 4, 4] and table.grad[0].tolist() == [0, 0, 0]
