"""What adapters add to logits: the loss and all gradients are those of whole logits, and each adapter has its own
tokens."""

import pytest
import torch
from attrs import evolve
from packed_rows import head
from torch import Tensor

from xtrain.runtime.nn.head_product import HeadFactors
from xtrain.runtime.nn.loss import IGNORE, Term, token_losses, whole_logits
from xtrain.runtime.nn.unit_losses import token_statistics

T, D, V, R = 23, 8, 37, 3
SPANS = ((0, 9, 2.0), (9, 9, 1.0), (9, 20, 0.5))  # tokens behind the last go through none


def inputs() -> tuple[Tensor, Tensor, tuple[HeadFactors, ...], Tensor]:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)

    factors = tuple(HeadFactors(drawn(R, D), drawn(V, R), scale, first, end) for first, end, scale in SPANS)
    labels_T = torch.randint(V, (T,), generator=generator)
    labels_T[::5] = IGNORE
    return drawn(T, D), drawn(V, D), factors, labels_T


def plain_logits(hidden_TD: Tensor, weight_VD: Tensor, factors: tuple[HeadFactors, ...]) -> Tensor:
    rows = []
    for first, end, each in [(f.first, f.end, f) for f in factors] + [(SPANS[-1][1], T, None)]:
        whole_VD = weight_VD if each is None else weight_VD + each.scale * each.b_VR @ each.a_RD
        rows.append(hidden_TD[first:end] @ whole_VD.T)
    return torch.cat(rows)


def leaves(hidden_TD: Tensor, weight_VD: Tensor, factors: tuple[HeadFactors, ...]) -> list[Tensor]:
    return [hidden_TD, weight_VD, *(each for own in factors for each in (own.a_RD, own.b_VR))]


@pytest.mark.parametrize("per_chunk", [4, 1000])
@pytest.mark.parametrize("kind", ["cross-entropy", "term", "statistics"])
def test_gradients_are_those_of_whole_logits(kind: str, per_chunk: int):
    hidden_TD, weight_VD, factors, labels_T = inputs()
    chosen, valid_T = head(0.0, per_chunk), labels_T != IGNORE
    logprob_T = plain_logits(hidden_TD, weight_VD, factors).log_softmax(-1)[torch.arange(T), labels_T.clamp(min=0)]
    if kind == "cross-entropy":
        ours = token_losses(hidden_TD, weight_VD, labels_T, chosen, factors=factors).objective
        plain = -logprob_T[valid_T].sum()
    elif kind == "term":
        term = Term(lambda logprob_T: logprob_T.exp())
        ours = token_losses(hidden_TD, weight_VD, labels_T, evolve(chosen, term=term), factors=factors).objective
        plain = logprob_T[valid_T].exp().sum()
    else:
        found = token_statistics(hidden_TD, weight_VD, labels_T, chosen, factors=factors)
        ours, plain = found["logprob_T"][valid_T].square().sum(), logprob_T[valid_T].square().sum()
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    own = leaves(hidden_TD, weight_VD, factors)
    pairs = zip(torch.autograd.grad(ours, own), torch.autograd.grad(plain, own), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_an_adapter_sees_nothing_of_the_tokens_of_others():
    """What is not a number among the logits of one stays there."""
    hidden_TD, weight_VD, factors, labels_T = inputs()
    own = leaves(hidden_TD, weight_VD, factors)
    alone = torch.autograd.grad(token_losses(hidden_TD, weight_VD, labels_T, head(0.0, 7), factors=factors)[0], own)
    broken = (factors[0]._replace(scale=float("nan")), *factors[1:])
    found = torch.autograd.grad(token_losses(hidden_TD, weight_VD, labels_T, head(0.0, 7), factors=broken)[0], own)
    assert found[2].isnan().all() and found[3].isnan().any()
    assert all(torch.equal(one, other) for one, other in zip(found[4:], alone[4:], strict=True))
    assert torch.equal(found[0][9:], alone[0][9:])


def test_whole_logits_have_them_too():
    hidden_TD, weight_VD, factors, _ = inputs()
    with torch.no_grad():
        found = whole_logits(hidden_TD, weight_VD, head(0.0, 7), factors)
        torch.testing.assert_close(found, plain_logits(hidden_TD, weight_VD, factors), rtol=1e-12, atol=1e-12)


def test_what_is_not_trained_has_no_gradient():
    hidden_TD, weight_VD, factors, labels_T = inputs()
    fixed = tuple(each._replace(a_RD=each.a_RD.detach()) for each in factors)
    loss = token_losses(hidden_TD.detach(), weight_VD.detach(), labels_T, head(0.0, 7), factors=fixed).objective
    assert torch.autograd.grad(loss, [each.b_VR for each in fixed])[0].any()
