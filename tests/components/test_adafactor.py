"""Adafactor as torch has it, each expert's matrix and vector by itself."""

import pytest
import torch
from torch import Tensor, nn

from xtrain.components.optimizers.adafactor_torch import AdafactorOptimizer, matrices_of

EPS = 2.0**-52  # that of fp64, which torch takes by default


def make(parameters: list[Tensor], experts: tuple[int, ...] = (), **options) -> AdafactorOptimizer:
    found = [matrices_of(f"w{i}", each, expert=i in experts) for i, each in enumerate(parameters)]
    groups = [{"params": parameters, "weight_decay": 0.1}]
    return AdafactorOptimizer(groups, found, 0.01, -0.8, EPS, 1e-3, 1.0, torch.device("cpu"), **options)


@pytest.mark.parametrize("at_once", [4, 2**24])
def test_it_is_that_of_torch(monkeypatch, at_once: int):
    """A wide matrix, a tall one and a vector, ten steps in fp64, with large gradients among them."""
    monkeypatch.setattr("xtrain.plan.groups.ELEMENTS_AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(1)
    ours = [nn.Parameter(torch.randn(*s, generator=generator, dtype=torch.float64)) for s in ((4, 7), (9, 3), (5,))]
    theirs = [nn.Parameter(each.detach().clone()) for each in ours]
    optimizer, expected = make(ours), torch.optim.Adafactor(theirs, lr=0.01, weight_decay=0.1, foreach=False)
    for step in range(10):
        for own, other in zip(ours, theirs, strict=True):
            own.grad = torch.randn(own.shape, generator=generator, dtype=torch.float64) * 10.0 ** (step % 3)
            other.grad = own.grad.clone()
        optimizer.step()
        expected.step()
        for own, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-14)
    assert optimizer.state[ours[0]]["row_var"].shape == (4, 1) and optimizer.state[ours[0]]["col_var"].shape == (1, 7)


def test_first_steps_are_those_of_the_reference_vectors():
    """Three steps of torch 2.13 on the 4 × 3 example of small whole numbers."""
    i, j = torch.arange(4, dtype=torch.float64)[:, None], torch.arange(3, dtype=torch.float64)
    weight = nn.Parameter((((i * 3 + j) * 7) % 11 - 5) / 10)
    optimizer = make([weight])
    for step in (1, 2, 3):
        weight.grad = (((i * 3 + j) * 5 + 3 * step) % 13 - 6) / 10
        optimizer.step()
    expected = [
        [-0.497084452070773, 0.198659590071477, -0.191282294221768],
        [0.493664538532361, 0.103533836965255, -0.296071953421343],
        [0.39785834826912, -0.000502137146683701, -0.401984754634457],
        [0.291374076520607, -0.0950438362596261, -0.507160535206431],
    ]
    torch.testing.assert_close(weight.detach(), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-14)


def test_experts_are_matrices_and_vectors_by_themselves():
    generator = torch.Generator().manual_seed(2)
    stacks = [nn.Parameter(torch.randn(*s, generator=generator, dtype=torch.float64)) for s in ((3, 4, 5), (3, 6))]
    apart = [nn.Parameter(each.detach().clone()) for stack in stacks for each in stack]
    ours, theirs = make([*stacks], experts=(0, 1)), torch.optim.Adafactor(apart, lr=0.01, weight_decay=0.1)
    for _ in range(5):
        for stack in stacks:
            stack.grad = torch.randn(stack.shape, generator=generator, dtype=torch.float64)
        for own, each in zip(apart, (each for stack in stacks for each in stack.grad), strict=True):
            own.grad = each.clone()
        ours.step()
        theirs.step()
    for own, each in zip(apart, (each for stack in stacks for each in stack.detach()), strict=True):
        torch.testing.assert_close(own.detach(), each, rtol=1e-12, atol=1e-14)
