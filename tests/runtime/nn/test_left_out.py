"""Losses over the tokens that sampling leaves, and divergences from a sampler, against what torch makes of masked
logits."""

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve

from xtrain.components.losses.gspo_torch import of_sequences
from xtrain.components.losses.policy_torch import clipped, of_tokens
from xtrain.dsl.schema.losses import ADVANTAGES, OLD
from xtrain.runtime.nn.batch import SHARE
from xtrain.runtime.nn.head_product import ComparedTokens, shares_of
from xtrain.runtime.nn.loss import IGNORE, Head, token_losses
from xtrain.runtime.nn.unit_losses import token_statistics

T, V, D, K = 11, 19, 7, 6


class Case:
    """Hidden states of tokens, two without label, each with the tokens that it was sampled from."""

    def __init__(self, temperature=0.7):
        torch.manual_seed(5)
        self.temperature = temperature
        self.hidden_TD = torch.randn(T, D, dtype=torch.float64, requires_grad=True)
        self.weight_VD = torch.randn(V, D, dtype=torch.float64, requires_grad=True)
        order_TV = torch.rand(T, V).argsort(-1)
        self.kept_TK = (order_TV[:, :K] + 1).int()
        for row in range(T):  # sets of 1 to K tokens
            self.kept_TK[row, 1 + row % K :] = 0
        self.labels_T = order_TV[:, 0].clone()  # which is kept
        self.labels_T[[2, 7]] = IGNORE
        self.valid_T = self.labels_T != IGNORE
        self.kept_TK[2] = 0
        self.columns = {
            OLD: -torch.rand(T, dtype=torch.float64),
            ADVANTAGES: torch.randn(T, dtype=torch.float64),
            SHARE: torch.rand(T, dtype=torch.float64),
        }

    def head(self, term, cap=None, tokens=4):
        sizes = {"vocabulary": V, "z_weight": 0.0, "chunk_bytes": 4 * V * tokens}
        return Head(**sizes, term=term, cap=cap, temperature=self.temperature, kept_TK=self.kept_TK)

    def logprob(self, cap=None):
        logits_TV = self.hidden_TD @ self.weight_VD.T
        logits_TV = logits_TV if cap is None else cap * torch.tanh(logits_TV / cap)
        kept_TV = torch.zeros(T, V + 1, dtype=torch.bool).scatter_(1, self.kept_TK.long(), True)[:, 1:]
        logits_TV = (logits_TV / self.temperature).masked_fill(~kept_TV, -1e9)
        return logits_TV.log_softmax(-1)

    def statistics(self, cap=None):
        log_TV = self.logprob(cap)
        label_T = log_TV.gather(1, self.labels_T.clamp(min=0)[:, None])[:, 0]
        return label_T, -(log_TV.exp() * log_TV).sum(-1)

    def gradients(self, loss):
        return torch.autograd.grad(loss, (self.hidden_TD, self.weight_VD))


@pytest.mark.parametrize("cap", [None, 3.0])
def test_a_loss_of_tokens_is_of_those_that_are_kept(cap):
    case = Case()
    settings = {"kl": "none", "kl_weight": 0.0, "normalise": "sequence", "entropy_weight": 0.1}
    term = of_tokens(clipped(0.2, 0.3), **settings)
    found = token_losses(
        case.hidden_TD, case.weight_VD, case.labels_T, case.head(term, cap), each=True, columns=case.columns
    )
    logprob_T, entropy_T = case.statistics(cap)
    ratio_T, advantage_T = (logprob_T - case.columns[OLD]).exp(), case.columns[ADVANTAGES]
    gain_T = torch.minimum(ratio_T * advantage_T, ratio_T.clamp(0.8, 1.3) * advantage_T)
    whole = ((-gain_T - 0.1 * entropy_T) * case.columns[SHARE])[case.valid_T].sum()
    torch.testing.assert_close(found.objective, whole, rtol=1e-12, atol=0)
    torch.testing.assert_close(case.gradients(found.objective), case.gradients(whole), rtol=1e-10, atol=1e-12)
    assert found.each_T is not None
    torch.testing.assert_close(found.each_T[case.valid_T], -logprob_T[case.valid_T].detach(), rtol=1e-12, atol=1e-14)


def test_the_tokens_of_a_sequence_are_those_that_are_kept():
    case = Case()
    reads = of_sequences(0.1, 0.1, entropy_weight=0.1).reads
    found = token_statistics(case.hidden_TD, case.weight_VD, case.labels_T, case.head(None), reads)
    for ours_T, theirs_T in zip(found.values(), case.statistics(), strict=True):
        torch.testing.assert_close(ours_T[case.valid_T], theirs_T[case.valid_T], rtol=1e-12, atol=1e-13)
    weights_T = torch.randn(T, dtype=torch.float64)
    losses = [
        sum((weights_T * each_T.square())[case.valid_T].sum() for each_T in some)
        for some in (found.values(), case.statistics())
    ]
    torch.testing.assert_close(*map(case.gradients, losses), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("number", [3, V])
def test_distributions_are_compared_by_the_likeliest_tokens_and_all_others_as_one(number):
    case = Case()
    case.kept_TK = torch.arange(1, V + 1).expand(T, V)
    head = evolve(case.head(of_tokens(clipped(0.2, 0.2), kl="none", kl_weight=0, normalise="token")))
    sampler_TV = (case.logprob().detach() + 0.3 * torch.randn(T, V, dtype=torch.float64)).log_softmax(-1)
    ids_TK = sampler_TV.topk(number).indices
    shares_TK1 = shares_of(sampler_TV.exp(), ids_TK, 0, None)
    compared = ComparedTokens(ids_TK.int(), shares_TK1, torch.zeros(T, dtype=torch.float64))
    given = (case.hidden_TD, case.weight_VD, case.labels_T)
    token_losses(*given, evolve(head, compared=compared), columns=case.columns)
    whole_T = F.kl_div(case.logprob(), sampler_TV, reduction="none", log_target=True).sum(-1)
    if number == V:
        torch.testing.assert_close(compared.apart_T, whole_T.detach(), rtol=1e-5, atol=1e-7)
    assert (compared.apart_T <= whole_T + 1e-7).all() and (compared.apart_T > 0).all()
    # Of the same numbers nothing is apart.
    own = shares_of(case.logprob().exp().detach(), ids_TK, 0, None)
    same = ComparedTokens(ids_TK, own, torch.ones(T, dtype=torch.float64))
    token_losses(*given, evolve(head, compared=same), columns=case.columns)
    assert same.apart_T.abs().max() < 1e-12
