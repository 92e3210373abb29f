"""Terms that are minimised instead of the cross-entropy, against torch on whole logits: values and gradients."""

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve
from packed_rows import T, V, head, inputs
from ranks import on_ranks

from xtrain.components.losses.cross_entropy_torch import cross_entropy
from xtrain.runtime.base.collectives import shared
from xtrain.runtime.nn.axes import TensorAxis
from xtrain.runtime.nn.loss import IGNORE, Term, token_losses

SMOOTHING = 0.2
Z = 0.3


def focal(logprob_T):
    return -((1 - logprob_T.exp()) ** 1.5) * logprob_T


def everything(logprob_T, mean_logprob_T, entropy_T, lse_T):
    return focal(logprob_T) + mean_logprob_T.sin() - 0.1 * entropy_T * logprob_T + (lse_T - 1).square().log1p()


TERMS = {
    "smoothed": cross_entropy(SMOOTHING),
    "focal": Term(focal),
    "entropy": Term(lambda logprob_T, entropy_T: -logprob_T - 0.1 * entropy_T, reads=("entropy_T",)),
    "everything": Term(everything, reads=("mean_logprob_T", "entropy_T", "lse_T")),
    "nothing of the label": Term(lambda logprob_T, lse_T: lse_T.square(), reads=("lse_T",)),
}


def on_whole_logits(name, hidden, weight, labels, z_weight, cap=None, temperature=1.0):
    """The objective by plain torch; of smoothed labels by its `cross_entropy`."""
    valid = labels != IGNORE
    logits = hidden[valid] @ weight.T
    logits = (logits if cap is None else cap * torch.tanh(logits / cap)) / temperature
    lse = torch.logsumexp(logits, -1)
    if name == "smoothed":
        loss = F.cross_entropy(logits, labels[valid], label_smoothing=SMOOTHING, reduction="sum")
    else:
        logprobs = torch.log_softmax(logits, -1)
        known = {"mean_logprob_T": logprobs.mean(-1), "entropy_T": -(logprobs.exp() * logprobs).sum(-1), "lse_T": lse}
        term = TERMS[name]
        given = {read: known[read] for read in term.reads}
        loss = term.function(logprobs.gather(1, labels[valid, None])[:, 0], **given).sum()
    return loss + z_weight * lse.square().sum()


def expected(name, z_weight=Z, cap=None, temperature=1.0):
    hidden, weight, labels = inputs()
    objective = on_whole_logits(name, hidden, weight, labels, z_weight, cap, temperature)
    (objective * 0.25).backward()
    return objective.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize(
    ("per_chunk", "cap", "temperature"), [(1, None, 1), (7, None, 1), (1000, None, 0.6), (7, 1.5, 1), (7, 1.5, 1.4)]
)
def test_a_term_is_what_it_is_on_whole_logits(name, per_chunk, cap, temperature):
    hidden, weight, labels = inputs()
    capped = evolve(head(Z, per_chunk), cap=cap, temperature=temperature)
    terms = token_losses(hidden, weight, labels, evolve(capped, term=TERMS[name]), each=True)
    (terms.objective * 0.25).backward()
    found = terms.objective.detach(), hidden.grad, weight.grad
    for ours, theirs in zip(found, expected(name, cap=cap, temperature=temperature), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-13)
    plain = token_losses(*inputs(), capped, each=True)
    assert torch.equal(terms.cross_entropy, plain.cross_entropy) and torch.equal(terms.each_T, plain.each_T)
    assert not torch.allclose(terms.objective, plain.objective)


def test_the_term_of_the_cross_entropy_is_the_cross_entropy():
    """Through the other path: what is minimised is the same to the last bits."""
    found = []
    for term in (None, Term(lambda logprob_T: -logprob_T), cross_entropy(0.0)):
        hidden, weight, labels = inputs()
        terms = token_losses(hidden, weight, labels, evolve(head(Z, 7), term=term))
        terms.objective.backward()
        found.append((terms.objective.detach(), hidden.grad, weight.grad))
    for other in found[1:]:
        assert all(torch.allclose(a, b, rtol=1e-14, atol=1e-14) for a, b in zip(found[0], other, strict=True))


def test_tokens_without_a_label_count_nowhere():
    """What a term would make of them, were it not a number, is not there either."""

    def strict(logprob_T):
        assert (logprob_T <= 0).all() and (logprob_T > -1e3).all()
        return (-logprob_T).sqrt()

    hidden, weight, labels = inputs()
    hidden.data[labels == IGNORE] *= 1e6
    terms = token_losses(hidden, weight, labels, evolve(head(0.0, 7), term=Term(strict)))
    terms.objective.backward()
    assert terms.objective.isfinite() and hidden.grad.isfinite().all() and weight.grad.isfinite().all()
    assert not hidden.grad[labels == IGNORE].any()


@pytest.mark.parametrize("name", TERMS)
def test_a_term_is_the_same_without_gradients(name):
    """As evaluations measure it."""
    hidden, weight, labels = inputs()
    capped = evolve(head(Z, 7), term=TERMS[name])
    with torch.no_grad():
        terms = token_losses(hidden, weight, labels, capped)
    assert not terms.objective.requires_grad
    assert torch.equal(terms.objective, token_losses(hidden, weight, labels, capped).objective.detach())


def test_a_backward_that_runs_twice_gives_the_same_gradients():
    hidden, weight, labels = inputs()
    terms = token_losses(hidden, weight, labels, evolve(head(Z, 7), term=TERMS["everything"], twice=True))
    once = torch.autograd.grad(terms.objective * 0.25, (hidden, weight), retain_graph=True)
    first = [grad.clone() for grad in once]
    again = torch.autograd.grad(terms.objective * 0.25, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_bf16_logits_are_taken_to_fp32():
    hidden, weight, labels = (t.detach().bfloat16() if t.is_floating_point() else t for t in inputs())
    hidden.requires_grad_()
    terms = token_losses(hidden, weight, labels, evolve(head(0.0, 1000), term=TERMS["smoothed"]))
    assert terms.objective.dtype == torch.float32
    logits = F.linear(hidden, weight).float()
    theirs = F.cross_entropy(logits, labels, label_smoothing=SMOOTHING, reduction="sum")
    assert torch.allclose(terms.objective, theirs, rtol=1e-6)


def cut_over_ranks(rank: int, world: int):
    """Of three ranks, whose vocabulary of 50 is 17, 17 and 16 rows."""
    group = torch.distributed.group.WORLD
    found = {}
    for name, term in TERMS.items():
        for whole_logits in (False, True):
            hidden, weight, labels = inputs()
            own = weight.detach().chunk(world)[rank].clone().requires_grad_()
            axis = TensorAxis(group=group, sequence=False, loss=not whole_logits)
            cut = evolve(head(Z, 7), tensor=axis, term=term)
            terms = token_losses(shared(hidden, group), own, labels, cut)
            (terms.objective * 0.25).backward()
            found[name, whole_logits] = terms.objective.detach(), hidden.grad, own.grad
    return found


def test_a_vocabulary_cut_over_ranks_gives_the_same(tmp_path):
    ranks = on_ranks(3, cut_over_ranks, tmp_path)
    for name in TERMS:
        objective, hidden_grad, weight_grad = expected(name)
        for piece, found in zip(weight_grad.chunk(3), ranks, strict=True):
            for whole_logits in (False, True):
                ours = found[name, whole_logits]
                for one, other in zip(ours, (objective, hidden_grad, piece), strict=True):
                    assert torch.allclose(one, other, rtol=1e-12, atol=1e-13), (name, whole_logits)
    assert T > 7 and V % 3


@pytest.mark.parametrize("dynamic", [False, True])
def test_weights_focal_and_dynamic_are_what_they_are_on_whole_logits(dynamic):
    """With smoothing, z-loss and a cap; a weight where there is no label spoils nothing."""
    term = cross_entropy(SMOOTHING, weighted=True, focal=1.5, dynamic=dynamic)
    weights = torch.rand(T, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    hidden, weight, labels = inputs()
    given = torch.where(labels != IGNORE, weights, float("nan"))
    found = token_losses(hidden, weight, labels, evolve(head(Z, 7), term=term), columns={"weights": given})
    (found.objective * 0.25).backward()
    ours = found.objective.detach(), hidden.grad, weight.grad
    hidden, weight, labels = inputs()
    valid = labels != IGNORE
    logits = hidden[valid] @ weight.T
    logprobs = torch.log_softmax(logits, -1)
    label = logprobs.gather(1, labels[valid, None])[:, 0]
    certain = label.exp().detach() if dynamic else 1.0
    loss = -(1 - SMOOTHING) * certain * (1 - label.exp()) ** 1.5 * label - SMOOTHING * logprobs.mean(-1)
    objective = (weights[valid] * loss).sum() + Z * torch.logsumexp(logits, -1).square().sum()
    (objective * 0.25).backward()
    for one, other in zip(ours, (objective.detach(), hidden.grad, weight.grad), strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-13)


def test_a_focal_loss_of_a_label_that_is_certain_has_a_gradient_of_nearly_zero():
    _, by, _ = cross_entropy(0.0, focal=0.5).by({"logprob_T": torch.tensor([0.0, -1e-30, -1.0], dtype=torch.float64)})
    assert by["logprob_T"].isfinite().all() and abs(by["logprob_T"][0]) < 1e-100


def test_what_a_term_measures_is_summed_over_valid_tokens():
    term = Term(lambda logprob_T: (-logprob_T, {"p": logprob_T.exp()}), metrics=("p",))
    hidden, weight, labels = inputs()
    found = token_losses(hidden, weight, labels, evolve(head(0.0, 7), term=term))
    valid = labels != IGNORE
    probability = torch.softmax(hidden[valid] @ weight.T, -1).gather(1, labels[valid, None]).sum()
    assert torch.allclose(found.recorded, torch.stack([found.objective, probability]).detach(), rtol=1e-12)
