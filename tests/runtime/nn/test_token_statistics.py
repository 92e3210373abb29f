"""Log-probabilities of labels with a backward that computes logits again, against torch on whole logits."""

import pytest
import torch
from attrs import evolve
from packed_rows import T, V, head, inputs
from ranks import on_ranks

from xtrain.runtime.base.collectives import shared
from xtrain.runtime.nn.axes import TensorAxis
from xtrain.runtime.nn.loss import IGNORE
from xtrain.runtime.nn.unit_losses import token_statistics

READS = ("mean_logprob_T", "entropy_T", "lse_T")


def of(found):
    """Something that looks across tokens: every log-probability has a gradient that depends on the others."""
    terms = [(number + 1) * (value.sum().sin() + value.square().mean()) for number, value in enumerate(found)]
    return torch.stack(terms).sum()


def expected(cap, temperature=1.0):
    hidden, weight, labels = inputs()
    valid = labels != IGNORE
    logits = hidden[valid] @ weight.T
    logits = (logits if cap is None else cap * torch.tanh(logits / cap)) / temperature
    logprobs = torch.log_softmax(logits, -1)
    statistics = (logprobs.mean(-1), -(logprobs.exp() * logprobs).sum(-1), torch.logsumexp(logits, -1))
    loss = of((logprobs.gather(1, labels[valid, None])[:, 0], *statistics))
    loss.backward()
    return loss.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize(
    ("per_chunk", "cap", "temperature"), [(1, None, 1), (7, None, 1), (1000, 1.5, 1), (7, 1.5, 0.7), (7, None, 2.5)]
)
def test_statistics_have_the_gradients_of_whole_logits(per_chunk, cap, temperature):
    hidden, weight, labels = inputs()
    chosen = evolve(head(0.0, per_chunk), cap=cap, temperature=temperature)
    found = token_statistics(hidden, weight, labels, chosen, READS)
    valid = labels != IGNORE
    loss = of([value[valid] for value in found.values()])
    loss.backward()
    for ours, theirs in zip((loss.detach(), hidden.grad, weight.grad), expected(cap, temperature), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-13)
    assert not hidden.grad[~valid].any() and (found["logprob_T"][~valid] == -1).all()


def test_a_backward_that_runs_twice_gives_the_same_gradients_and_lets_go_of_them():
    hidden, weight, labels = inputs()
    found = token_statistics(hidden, weight, labels, evolve(head(0.0, 7), twice=True))["logprob_T"]
    loss = found.sum().sin()
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    assert found.grad_fn.grads is not None
    again = torch.autograd.grad(loss, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)) and found.grad_fn.grads is None


def test_a_frozen_head_has_no_gradient_and_no_copy_of_one():
    hidden, weight, labels = inputs()
    found = token_statistics(hidden, weight.detach(), labels, head(0.0, 7))["logprob_T"]
    found[labels != IGNORE].sum().backward()
    assert hidden.grad.any()


def cut_over_ranks(rank: int, world: int):
    """Of three ranks, whose vocabulary of 50 is 17, 17 and 16 rows."""
    group = torch.distributed.group.WORLD
    found = []
    for whole_logits in (False, True):
        hidden, weight, labels = inputs()
        own = weight.detach().chunk(world)[rank].clone().requires_grad_()
        cut = evolve(head(0.0, 7), tensor=TensorAxis(group=group, sequence=False, loss=not whole_logits))
        statistics = token_statistics(shared(hidden, group), own, labels, cut, READS)
        loss = of([value[labels != IGNORE] for value in statistics.values()])
        loss.backward()
        found.append((loss.detach(), hidden.grad, own.grad))
    return found


def test_a_vocabulary_cut_over_ranks_gives_the_same(tmp_path):
    loss, hidden_grad, weight_grad = expected(None)
    for piece, found in zip(weight_grad.chunk(3), on_ranks(3, cut_over_ranks, tmp_path), strict=True):
        for ours in found:
            for one, other in zip(ours, (loss, hidden_grad, piece), strict=True):
                assert torch.allclose(one, other, rtol=1e-12, atol=1e-13)
    assert T > 7 and V % 3
