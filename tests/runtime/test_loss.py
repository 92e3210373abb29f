"""The chunked loss against the plain one, value and gradients."""

import pytest
import torch
import torch.nn.functional as F

from xtrain.runtime.models.loss import IGNORE, token_losses

T, D, V = 37, 16, 50


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, D, dtype=torch.float64, generator=generator).requires_grad_()
    weight = torch.randn(V, D, dtype=torch.float64, generator=generator).requires_grad_()
    labels = torch.randint(0, V, (T,), generator=generator)
    labels[::5] = IGNORE
    labels[20:30] = IGNORE  # at some sizes a whole chunk has no valid label
    return hidden, weight, labels


def plain(hidden, weight, labels, z_weight):
    valid = labels != IGNORE
    logits = hidden[valid] @ weight.T
    lse = torch.logsumexp(logits, -1)
    cross_entropy = (lse - logits.gather(1, labels[valid, None]).squeeze(1)).sum()
    return cross_entropy + z_weight * lse.square().sum(), cross_entropy


@pytest.mark.parametrize("z_weight", [0.0, 0.3])
@pytest.mark.parametrize("per_chunk", [1, 5, 7, 36, 37, 1000])
def test_every_chunk_size_gives_the_plain_loss(per_chunk, z_weight):
    hidden, weight, labels = inputs()
    terms = token_losses(hidden, weight, labels, z_weight=z_weight, chunk_bytes=4 * V * per_chunk)
    (terms.objective * 0.25).backward()
    ours = hidden.grad, weight.grad
    hidden, weight, labels = inputs()
    objective, cross_entropy = plain(hidden, weight, labels, z_weight)
    (objective * 0.25).backward()
    assert torch.allclose(terms.objective, objective, rtol=1e-13)
    assert torch.allclose(terms.cross_entropy, cross_entropy, rtol=1e-13)
    assert torch.allclose(ours[0], hidden.grad, atol=1e-13)
    assert torch.allclose(ours[1], weight.grad, atol=1e-13)


@pytest.mark.parametrize("per_chunk", [5, 1000])
def test_without_valid_labels_the_loss_is_zero_and_has_a_gradient(per_chunk):
    hidden, weight, _ = inputs()
    terms = token_losses(hidden, weight, torch.full((T,), IGNORE), z_weight=0.1, chunk_bytes=4 * V * per_chunk)
    terms.objective.backward()
    assert terms.objective.item() == 0.0
    assert hidden.grad.abs().sum() == 0 and weight.grad.abs().sum() == 0


def test_bf16_logits_are_taken_to_fp32():
    hidden, weight, labels = (t.detach() for t in inputs())
    terms = token_losses(hidden.bfloat16(), weight.bfloat16(), labels, z_weight=0.0, chunk_bytes=2**30)
    assert terms.cross_entropy.dtype == torch.float32
    logits = F.linear(hidden.bfloat16(), weight.bfloat16()).float()
    assert torch.equal(terms.cross_entropy, F.cross_entropy(logits, labels, reduction="sum"))


def test_evaluation_needs_no_gradient():
    hidden, weight, labels = (t.detach() for t in inputs())
    with torch.no_grad():
        terms = token_losses(hidden, weight, labels, z_weight=0.0, chunk_bytes=4 * V * 3)
    assert torch.allclose(terms.cross_entropy, plain(hidden, weight, labels, 0.0)[1])
