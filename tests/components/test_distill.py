"""The divergence from a teacher against what torch makes of whole logits: values, metrics and gradients by logits."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve

from xtrain.components.losses.distill import POLICY_GRADIENT, measured_by
from xtrain.dsl.schema.losses import OLD, TEACHER_IDS, TEACHER_LOGPROBS
from xtrain.runtime.nn.distillation import Distillation, Taught, distillation_losses, divergence, live_losses
from xtrain.runtime.nn.loss import IGNORE, Head
from xtrain.runtime.sampling.teaching import largest

T, V, D = 11, 19, 7
VECTORS = json.loads((Path(__file__).parents[1] / "support" / "loss_vectors.json").read_text())["gkd"]
FORMS = ("forward_kl", "reverse_kl", "jsd")


def term(form="forward_kl", beta=0.5, temperature=1.0, mix=0.0):
    return Distillation(form=form, beta=beta, temperature=temperature, mix=mix, metrics=measured_by(form))


class Case:
    """Hidden states of some tokens, two of which have no label, and the logits of a teacher."""

    def __init__(self, dtype=torch.float64, spread=2.0):
        torch.manual_seed(3)
        self.hidden_TD = torch.randn(T, D, dtype=dtype, requires_grad=True)
        self.weight_VD = (torch.randn(V, D, dtype=dtype) * spread).requires_grad_()
        self.teacher_TV = torch.randn(T, V, dtype=dtype) * spread
        self.labels_T = torch.randint(0, V, (T,))
        self.labels_T[[2, 7]] = IGNORE
        self.valid_T = self.labels_T != IGNORE

    def stored(self, top, temperature):
        ids_TK, logprobs_TK1 = largest(self.teacher_TV / temperature, top)
        logprobs_TK1[~self.valid_T] = 0.0  # as where nothing is stored
        return {TEACHER_IDS: ids_TK.int(), TEACHER_LOGPROBS: logprobs_TK1}

    def minimised(self, chosen, top, z_weight=0.0, cap=None, tokens=4):
        head = Head(vocabulary=V, z_weight=z_weight, chunk_bytes=4 * V * tokens, term=chosen, cap=cap)
        columns = self.stored(top, chosen.temperature)
        return distillation_losses(self.hidden_TD, self.weight_VD, self.labels_T, head, columns, each=True)

    def live(self, chosen, z_weight=0.0, cap=None, tokens=4):
        """Of a teacher whose head gives its logits."""
        head = Head(vocabulary=V, z_weight=z_weight, chunk_bytes=8 * V * tokens, term=chosen, cap=cap)
        taught = Taught(self.teacher_TV, torch.eye(V, dtype=self.teacher_TV.dtype), evolve(head, cap=None))
        return live_losses(self.hidden_TD, self.weight_VD, self.labels_T, head, taught, each=True)

    def sampled(self, logprobs_T, z_weight=0.0, cap=None, tokens=4, temperature=1.0):
        """By policy gradient, of labels that were sampled with these log-probabilities."""
        head = evolve(
            Head(vocabulary=V, z_weight=z_weight, chunk_bytes=8 * V * tokens, term=term(POLICY_GRADIENT), cap=cap),
            temperature=temperature,
        )
        taught = Taught(self.teacher_TV, torch.eye(V, dtype=self.teacher_TV.dtype), evolve(head, cap=None))
        columns = {OLD: logprobs_T}
        return live_losses(self.hidden_TD, self.weight_VD, self.labels_T, head, taught, columns, each=True)

    def gradients(self, loss):
        return torch.autograd.grad(loss, (self.hidden_TD, self.weight_VD))

    def logits(self, cap=None):
        logits_TV = self.hidden_TD @ self.weight_VD.T
        return logits_TV if cap is None else cap * torch.tanh(logits_TV / cap)


def of_trl(form, beta, student_TV, teacher_TV, temperature):
    """Of each token, as `GKDTrainer.generalized_jsd_loss` of TRL computes it: by `kl_div` of whole distributions."""
    student_TV, teacher_TV = (F.log_softmax(each / temperature, dim=-1) for each in (student_TV, teacher_TV))
    if form == "forward_kl":
        found_TV = F.kl_div(student_TV, teacher_TV, reduction="none", log_target=True)
    elif form == "reverse_kl":
        found_TV = F.kl_div(teacher_TV, student_TV, reduction="none", log_target=True)
    else:
        share = torch.tensor(beta, dtype=student_TV.dtype)
        parts = torch.stack([student_TV + torch.log1p(-share), teacher_TV + torch.log(share)])
        mixed_TV = torch.logsumexp(parts, dim=0)
        of_teacher_TV = F.kl_div(mixed_TV, teacher_TV, reduction="none", log_target=True)
        found_TV = share * of_teacher_TV + (1 - share) * F.kl_div(
            mixed_TV, student_TV, reduction="none", log_target=True
        )
    return found_TV.sum(-1)


def bucketed(log_TV, ids_TK):
    """Log-probabilities of some tokens, and of all others together."""
    inside_TV = torch.zeros_like(log_TV, dtype=torch.bool).scatter_(1, ids_TK, True)
    rest_T = log_TV.masked_fill(inside_TV, -torch.inf).logsumexp(-1)
    return torch.cat((log_TV.gather(1, ids_TK), rest_T[:, None]), 1)


@pytest.mark.parametrize("live", [False, True], ids=["stored", "live"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("temperature", "mix", "z_weight", "cap"), [
    (1.0, 0.0, 0.0, None), (1.0, 0.3, 0.01, None), (2.5, 0.0, 0.0, None), (0.7, 0.4, 0.02, None), (1.5, 0.2, 0.0, 3.0),
])  # fmt: skip
def test_all_tokens_but_one_are_the_whole_distribution(form, temperature, mix, z_weight, cap, live):
    """And so is what a teacher gives that computes beside the student."""
    case, beta = Case(), 0.3
    chosen = term(form, beta, temperature, mix)
    ours = case.live(chosen, z_weight, cap) if live else case.minimised(chosen, V - 1, z_weight, cap)
    logits_TV = case.logits(cap)
    apart_T = of_trl(form, beta, logits_TV, case.teacher_TV, temperature)
    nll_T = F.cross_entropy(logits_TV, case.labels_T, reduction="none")
    lse_T = logits_TV.logsumexp(-1)
    each_T = (1 - mix) * temperature**2 * apart_T + mix * nll_T + z_weight * lse_T.square()
    whole = each_T[case.valid_T].sum()
    torch.testing.assert_close(ours.objective, whole, rtol=1e-12, atol=0)
    torch.testing.assert_close(case.gradients(ours.objective), case.gradients(whole), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(ours.each_T, nll_T.detach(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(ours.cross_entropy, nll_T.sum().detach(), rtol=1e-12, atol=0)
    agree = (logits_TV.argmax(-1) == case.teacher_TV.argmax(-1))[case.valid_T].sum().double()
    expected = torch.stack((whole.detach(), apart_T[case.valid_T].sum().detach(), agree))
    torch.testing.assert_close(ours.recorded, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("z_weight", "cap", "temperature"), [(0.0, None, 1.0), (0.02, 3.0, 0.7)])
def test_a_policy_gradient_is_that_of_the_published_recipe(z_weight, cap, temperature):
    """Advantages `-(sampled_logprobs - teacher_logprobs)`, and the loss `-(exp(logprobs - sampled) · advantages)`."""
    case = Case()
    old_T = -2 * torch.rand(T, dtype=torch.float64)
    given_T = old_T.masked_fill(~case.valid_T, torch.nan)  # no label, nothing read
    ours = case.sampled(given_T, z_weight, cap, temperature=temperature)
    labels_T1 = case.labels_T.clamp(min=0)[:, None]
    logits_TV = case.logits(cap) / temperature
    logprob_T = logits_TV.log_softmax(-1).gather(1, labels_T1)[:, 0]
    taught_T = (case.teacher_TV / temperature).log_softmax(-1).gather(1, labels_T1)[:, 0]
    advantage_T, ratio_T = -(old_T - taught_T), (logprob_T - old_T).exp()
    each_T = -ratio_T * advantage_T + z_weight * logits_TV.logsumexp(-1).square()
    whole = each_T[case.valid_T].sum()
    torch.testing.assert_close(ours.objective, whole, rtol=1e-12, atol=0)
    torch.testing.assert_close(case.gradients(ours.objective), case.gradients(whole), rtol=1e-10, atol=1e-12)
    assert ours.each_T is not None
    torch.testing.assert_close(ours.each_T[case.valid_T], -logprob_T[case.valid_T].detach(), rtol=1e-12, atol=1e-14)
    sums = [each_T[case.valid_T].sum().detach() for each_T in (-advantage_T, ratio_T)]
    torch.testing.assert_close(ours.recorded, torch.stack((whole.detach(), *sums)), rtol=1e-12, atol=0)


def test_a_policy_gradient_has_the_gradient_of_reverse_kl_on_average():
    """Over all tokens that the model may sample, by their probability."""
    case = Case()
    logprob_TV = case.logits().log_softmax(-1).detach()
    for row in (0, 4):
        case.labels_T = torch.full((T,), IGNORE)
        case.labels_T[row] = 0
        expected = case.gradients(case.live(term("reverse_kl")).objective)
        found = [torch.zeros_like(each) for each in expected]
        for token in range(V):
            case.labels_T[row] = token
            for whole, part in zip(found, case.gradients(case.sampled(logprob_TV[:, token]).objective), strict=True):
                whole += logprob_TV[row, token].exp() * part
        torch.testing.assert_close(found, list(expected), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("live", [False, True], ids=["stored", "live"])
@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: f"{case['beta']}, {case['temperature']}")
def test_it_is_that_of_trl(case, live):
    """`GKDTrainer.generalized_jsd_loss` with the logits of the file, of all five tokens together."""
    logits_TV = torch.tensor(VECTORS["student_logits"], dtype=torch.float64, requires_grad=True)
    teacher_TV = torch.tensor(VECTORS["teacher_logits"], dtype=torch.float64)
    tokens, width = logits_TV.shape
    form = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(case["beta"], "jsd")
    chosen = term(form, case["beta"], case["temperature"])
    head = Head(vocabulary=width, z_weight=0.0, chunk_bytes=4 * width * 2, term=chosen)
    ids_TK, logprobs_TK1 = largest(teacher_TV / case["temperature"], width - 1)
    columns = {TEACHER_IDS: ids_TK.int(), TEACHER_LOGPROBS: logprobs_TK1}
    labels_T, identity_VV = torch.zeros(tokens, dtype=torch.int64), torch.eye(width, dtype=torch.float64)
    if live:
        ours = live_losses(logits_TV, identity_VV, labels_T, head, Taught(teacher_TV, identity_VV, head))
    else:
        ours = distillation_losses(logits_TV, identity_VV, labels_T, head, columns)
    factor = case["temperature"] ** 2  # TRL has none
    assert ours.objective.item() == pytest.approx(factor * case["loss"], rel=1e-10)
    (grad_TV,) = torch.autograd.grad(ours.objective, logits_TV)
    wanted_TV = factor * torch.tensor(case["grad"], dtype=torch.float64)
    torch.testing.assert_close(grad_TV, wanted_TV, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("top", [1, 5])
def test_the_other_tokens_count_as_one(form, top):
    case = Case()
    ours = case.minimised(term(form, 0.3, 2.0, 0.1), top)
    logits_TV = case.logits()
    teacher_TV = F.log_softmax(case.teacher_TV / 2, -1)
    ids_TK = teacher_TV.topk(top).indices
    student_TK1 = bucketed(F.log_softmax(logits_TV / 2, -1), ids_TK)
    apart_T = divergence(form, 0.3, bucketed(teacher_TV, ids_TK), student_TK1).value_T
    whole = (0.9 * 4 * apart_T + 0.1 * F.cross_entropy(logits_TV, case.labels_T, reduction="none"))[case.valid_T].sum()
    torch.testing.assert_close(ours.objective, whole, rtol=1e-12, atol=0)
    torch.testing.assert_close(case.gradients(ours.objective), case.gradients(whole), rtol=1e-10, atol=1e-12)
    # Never more than over the vocabulary.
    assert (apart_T <= of_trl(form, 0.3, logits_TV, case.teacher_TV, 2.0) + 1e-12).all()


@pytest.mark.parametrize("form", FORMS)
def test_derivatives_by_log_probabilities_are_those_of_torch(form):
    torch.manual_seed(0)
    teacher_TN, student_TN = (torch.randn(6, 9, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    student_TN.requires_grad_()
    found = divergence(form, 0.2, teacher_TN, student_TN)
    (slope_TN,) = torch.autograd.grad(found.value_T.sum(), student_TN)
    # Both are right up to what the sum of all probabilities, 1, says: what the softmax takes out.
    apart_TN = slope_TN - found.slope_TN
    softmax_TN = student_TN.detach().exp()
    torch.testing.assert_close(apart_TN, softmax_TN * apart_TN.sum(-1, keepdim=True), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_a_student_that_is_its_teacher_has_no_loss_and_no_gradient(form):
    case = Case()
    case.teacher_TV = case.logits().detach()
    ours = case.minimised(term(form, 0.4, 2.0), 5)
    torch.testing.assert_close(ours.objective, torch.zeros_like(ours.objective), rtol=0, atol=1e-13)
    for gradient in case.gradients(ours.objective):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-12)
    assert ours.recorded[2] == case.valid_T.sum()


@pytest.mark.parametrize("form", FORMS)
def test_distributions_far_apart_and_sure_stay_finite(form):
    case = Case(torch.float32, spread=60.0)
    for ours in (case.minimised(term(form, 0.5, 1.0, 0.1), 3), case.live(term(form, 0.5, 1.0, 0.1))):
        whole = case.gradients(ours.objective)
        assert torch.isfinite(ours.objective) and all(torch.isfinite(each).all() for each in whole)


def test_a_piece_more_or_less_is_the_same():
    case = Case()
    live = [case.live(term("jsd", 0.3, 2.0, 0.2), tokens=tokens) for tokens in (1, 3, T)]
    same(case, live)
    same(case, [case.minimised(term("jsd", 0.3, 2.0, 0.2), 4, tokens=tokens) for tokens in (1, 3, T)])


def same(case, found):
    first = case.gradients(found[0].objective)
    for each in found[1:]:
        torch.testing.assert_close(each.recorded, found[0].recorded, rtol=1e-13, atol=0)
        torch.testing.assert_close(case.gradients(each.objective), first, rtol=1e-12, atol=1e-13)
