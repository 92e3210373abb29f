"""Losses of pairs, answers and policies against what TRL makes of the same numbers: values, and gradients by logits.

`loss_vectors.json` has log-probabilities of the labels of a few sequences, and what came of them. A head whose weight
is the identity gives a label that log-probability; the other tokens of the vocabulary share the rest of it.
"""

import json
import math
from pathlib import Path

import pytest
import torch

from xtrain.components.losses import cispo_torch, cpo_torch, dpo_torch, gspo_torch, kto_torch, orpo_torch, simpo_torch
from xtrain.components.losses.importance_sampling_torch import weighted
from xtrain.components.losses.policy_torch import clipped, of_tokens
from xtrain.dsl.schema.losses import ADVANTAGES, OLD, REF
from xtrain.runtime.feed.microbatch import Units
from xtrain.runtime.nn.axes import Axes
from xtrain.runtime.nn.loss import IGNORE, Head, token_losses
from xtrain.runtime.nn.unit_losses import UnitTerm, unit_losses
from xtrain.runtime.sampling.reference_weights import ReferencePoint

VECTORS = json.loads((Path(__file__).parents[1] / "support" / "loss_vectors.json").read_text())
V = 5
LABEL = 2


class Rows:
    """Sequences one behind the other, each with a token without a label in front, whose numbers would spoil all."""

    def __init__(self, logps, columns, members, values=None):
        flat = [-7.0 if at == 0 else row[at - 1] for row in logps for at in range(len(row) + 1)]
        hidden_TV = torch.log1p(-torch.tensor(flat, dtype=torch.float64).exp()).sub(math.log(V - 1))
        hidden_TV = hidden_TV[:, None].repeat(1, V)
        hidden_TV[:, LABEL] = torch.tensor(flat, dtype=torch.float64)
        self.hidden_TV = hidden_TV.requires_grad_()
        self.labels_T = torch.tensor([IGNORE if at == 0 else LABEL for row in logps for at in range(len(row) + 1)])
        self.columns = {
            name: torch.tensor([x for row in rows for x in (float("nan"), *row)], dtype=torch.float64)
            for name, rows in columns.items()
        }
        self.tokens = [len(row) for row in logps]
        segments = torch.tensor([number for number, row in enumerate(logps) for _ in range(len(row) + 1)])
        self.units = Units(
            segment_BS=segments[None],
            tokens_N=torch.tensor(self.tokens),
            last_N=torch.tensor(self.tokens).add(1).cumsum(0) - 1,
            members_KU=torch.tensor(members),
            values={name: torch.tensor(each, dtype=torch.float64) for name, each in (values or {}).items()},
        )

    def minimised(self, term, divisor, straight=True):
        """What is minimised, its metrics, and the gradients by the log-probability of each label, by those of logits.

        Of a logit z_j the gradient is g (1[j = label] − p_j) of that of the log-probability, g; if `straight`, by
        nothing else.
        """
        head = Head(vocabulary=V, z_weight=0.0, chunk_bytes=4 * V * 3, term=term)
        weight_VV = torch.eye(V, dtype=torch.float64)
        columns = {**self.columns, "share": self.units.share_BS.flatten()}
        if isinstance(term, UnitTerm):
            found = unit_losses(self.hidden_TV, weight_VV, self.labels_T, head, columns, self.units, Axes())
        else:
            found = token_losses(self.hidden_TV, weight_VV, self.labels_T, head, columns=columns)
        (found.objective / divisor).backward()
        grad_TV, softmax_TV = self.hidden_TV.grad, self.hidden_TV.detach().softmax(-1)
        assert not grad_TV[self.labels_T == IGNORE].any() and torch.isfinite(grad_TV).all()
        by_T = grad_TV[:, LABEL] / (1 - softmax_TV[:, LABEL])
        whole_TV = by_T[:, None] * (torch.eye(V, dtype=torch.float64)[LABEL] - softmax_TV)
        assert not straight or torch.allclose(grad_TV, whole_TV, rtol=1e-10, atol=1e-12)
        slopes = by_T[self.labels_T != IGNORE].split(self.tokens)
        assert found.recorded[0] == found.objective
        metrics = dict(zip(term.metrics, (found.recorded[1:] / divisor).tolist(), strict=True))
        return found.objective.item() / divisor, metrics, [slope.tolist() for slope in slopes]


def pairs(columns=True):
    given = VECTORS["inputs"]
    return Rows(given["policy_logps"], {REF: given["reference_logps"]} if columns else {}, [[0, 1], [2, 3]])


DPO = {
    "sigmoid": dpo_torch.preference(0.1, "sigmoid"),
    "hinge": dpo_torch.preference(0.1, "hinge"),
    "ipo": dpo_torch.preference(0.1, "ipo"),
    "robust": dpo_torch.preference(0.1, "robust", 0.1),
    "sigmoid_norm": dpo_torch.preference(2.0, "sigmoid", length_normalised=True),
}


@pytest.mark.parametrize("name", DPO)
def test_dpo_is_that_of_trl(name):
    loss, metrics, slopes = pairs().minimised(DPO[name], 2)
    expected = VECTORS["dpo"][name]
    assert loss == pytest.approx(expected["loss"], rel=1e-10)
    for ours, theirs in zip(slopes, expected["grad_per_token"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-10)
    if name in ("sigmoid", "hinge", "robust"):  # sums of c and j in the file: 1.2, 0 and −0.6, −0.2
        assert metrics["rewards/accuracy"] == 1.0 and metrics["rewards/chosen"] == pytest.approx(0.06)
        assert metrics["rewards/margin"] == pytest.approx(0.1)


def test_smoothed_dpo_is_its_formula():
    loss, _, _ = pairs().minimised(dpo_torch.preference(0.1, "sigmoid", 0.2), 2)
    d = torch.tensor([1.8, 0.2], dtype=torch.float64) * 0.1
    ell = torch.nn.functional.logsigmoid
    assert loss == pytest.approx((-0.8 * ell(d) - 0.2 * ell(-d)).mean().item(), rel=1e-12)


def at(point):
    return ReferencePoint(value=point, estimated=False)


@pytest.mark.parametrize(("form", "step0"), [("sigmoid", 0.6931471805599453), ("ipo", 25.0), ("hinge", 1.0)])
def test_a_policy_that_is_its_reference_loses_what_it_must_to_the_last_bit(form, step0):
    """Of the log-probabilities that the head itself gives."""
    rows = pairs()
    head = Head(vocabulary=V, z_weight=0.0, chunk_bytes=4 * V * 4)
    found = token_losses(rows.hidden_TV.detach(), torch.eye(V, dtype=torch.float64), rows.labels_T, head, each=True)
    rows.columns = {REF: -found.each_T}
    loss, metrics, _ = rows.minimised(dpo_torch.preference(0.1, form), 2)
    assert loss == step0 and metrics["rewards/margin"] == metrics["rewards/chosen"] == 0.0
    answers = Rows(VECTORS["inputs"]["policy_logps"], {}, [[0, 1, 2, 3]], {"label": [1, 0, 1, 0]})
    answers.columns = {REF: -found.each_T}
    assert answers.minimised(kto_torch.judged(0.1, 1.0, 1.0, at(0.0)), 4)[0] == 0.5


@pytest.mark.parametrize(("name", "point"), [("kto", 0.275), ("apo_zero_unpaired", 0.0)])
def test_kto_is_that_of_trl(name, point):
    given = VECTORS["inputs"]
    rows = Rows(given["policy_logps"], {REF: given["reference_logps"]}, [[0, 1, 2, 3]], {"label": [1, 1, 0, 0]})
    loss, metrics, slopes = rows.minimised(kto_torch.judged(0.1, 1.0, 1.0, at(point)), 4)
    expected = VECTORS["kto"][name]
    assert loss == pytest.approx(expected["loss"], rel=1e-10)
    for ours, theirs in zip(slopes, expected["grad_per_sequence"], strict=True):
        assert ours == pytest.approx([theirs] * len(ours), rel=1e-10)
    assert metrics == {"rewards/margin": pytest.approx(0.05), "rewards/accuracy": 0.75}
    weighted_loss, _, _ = rows.minimised(kto_torch.judged(0.1, 2.0, 2.0, at(point)), 4)
    assert weighted_loss == pytest.approx(2 * expected["loss"], rel=1e-10)


@pytest.mark.parametrize("name", ["likelier", "less_likely", "weighted"])
def test_kto_with_an_estimated_point_is_that_of_trl(name):
    """The point is the one that its trainer has estimated; test_reference_point.py estimates it too."""
    given = VECTORS["kto_estimated"]["cases"][name]
    labels = [float(label) for *_, label in VECTORS["kto_estimated"]["documents"]]
    rows = Rows(given["policy_logps"], {REF: given["reference_logps"]}, [[0, 1, 2, 3]], {"label": labels})
    point = ReferencePoint(value=given["kl"], estimated=True)
    term = kto_torch.judged(given["beta"], given["desirable"], given["undesirable"], point)
    loss, metrics, slopes = rows.minimised(term, 4)
    assert loss == pytest.approx(given["loss"], rel=1e-10)
    for ours, theirs in zip(slopes, given["grad_per_token"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-10)
    # TRL subtracts the mean over two undesirable answers from that over two desirable ones.
    assert metrics["rewards/margin"] == pytest.approx(given["margin"] / 2, rel=1e-10)
    assert metrics["rewards/reference_point"] == pytest.approx(given["kl"], rel=1e-12)


def test_orpo_is_that_of_trl_with_the_cross_entropy_of_each_pair():
    """TRL takes the cross-entropy over the tokens of all chosen answers of a batch; here it is of each, as log p."""
    expected = VECTORS["orpo"]
    loss, _, slopes = pairs(columns=False).minimised(orpo_torch.preference(0.1), 2)
    odds = -sum(expected["log_odds_term_per_pair"]) / 2
    chosen, other = expected["average_logps"][:2]
    assert loss == pytest.approx(odds - (chosen + other) / 2, rel=1e-10)
    assert all(slope < 0 for row in slopes[:2] for slope in row) and all(s > 0 for row in slopes[2:] for s in row)


def test_simpo_and_cpo_are_those_of_trl():
    terms = {"simpo": simpo_torch.preference(2.0, 0.5)}
    terms |= {f"cpo_{form}": cpo_torch.preference(0.1, form, 0.0, 0.0) for form in ("sigmoid", "hinge", "ipo")}
    for name, term in terms.items():
        loss, _, slopes = pairs(columns=False).minimised(term, 2)
        assert loss == pytest.approx(VECTORS[name]["loss"], rel=1e-10), name
        assert len(slopes) == 4
    plain, _, _ = pairs(columns=False).minimised(terms["cpo_sigmoid"], 2)
    more, _, _ = pairs(columns=False).minimised(cpo_torch.preference(0.1, "sigmoid", 0.0, 0.5), 2)
    means = VECTORS["orpo"]["average_logps"]
    assert more - plain == pytest.approx(-0.5 * sum(means[:2]) / 2, rel=1e-10)


# Policies ------------------------------------------------------------------------------------------------------------


def sampled():
    given = VECTORS["policy"]["inputs"]
    lengths = [sum(row) for row in given["mask"]]
    cut = {
        name: [row[:length] for row, length in zip(given[f"{key}_logps"], lengths, strict=True)]
        for name, key in (("new", "new"), (OLD, "old"), (REF, "ref"))
    }
    advantages = [[a] * length for a, length in zip(given["advantages"], lengths, strict=True)]
    return Rows(cut["new"], {OLD: cut[OLD], REF: cut[REF], ADVANTAGES: advantages}, [[0, 1, 2]])


def tokens_term(surrogate, normalise="token", kl="none", kl_weight=0.0, max_tokens=None, entropy_weight=0.0):
    more = {"max_tokens": max_tokens, "entropy_weight": entropy_weight}
    return of_tokens(surrogate, kl=kl, kl_weight=kl_weight, normalise=normalise, **more)


POLICIES = {
    "grpo": (tokens_term(clipped(0.2, 0.2), "sequence"), 3),
    "bnpo": (tokens_term(clipped(0.2, 0.2)), 9),
    "dr_grpo": (tokens_term(clipped(0.2, 0.2), "dr_grpo", max_tokens=4), 3),
    "dapo": (tokens_term(clipped(0.2, 0.28)), 9),
    "grpo_kl": (tokens_term(clipped(0.2, 0.2), "sequence", "k3", 0.04), 3),
    "gspo": (gspo_torch.of_sequences(3e-4, 4e-4), 3),
    "cispo": (tokens_term(cispo_torch.weighted(0.0, 5.0)), 9),
    "grpo_two_sided": (tokens_term(clipped(0.2, 0.2, 1.5), "sequence"), 3),
    "tinker_importance_sampling": (tokens_term(weighted), 1),
    "tinker_ppo": (tokens_term(clipped(0.2, 0.2)), 1),
    "tinker_cispo": (tokens_term(cispo_torch.weighted(0.8, 1.2)), 1),
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_loss_is_that_of_trl_or_tinker(name):
    term, divisor = POLICIES[name]
    loss, metrics, slopes = sampled().minimised(term, divisor)
    expected = VECTORS["policy"][name]
    assert loss == pytest.approx(expected.get("loss", expected.get("loss_sum")), rel=1e-10)
    for ours, theirs in zip(slopes, expected["grad"], strict=True):
        assert ours == pytest.approx(theirs[: len(ours)], rel=1e-10, abs=1e-12)
        assert not any(theirs[len(ours) :])
    assert metrics["policy/entropy"] > 0 and metrics["policy/kl"] > 0


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_penalties_are_the_estimates_of_the_divergence(kl):
    found = [sampled().minimised(tokens_term(weighted, kl=kl, kl_weight=weight), 1) for weight in (1.0, 2.0)]
    estimates = sum(sum(row) for row in VECTORS["policy"]["kl_estimators_vs_ref"][kl])
    assert found[1][0] - found[0][0] == pytest.approx(estimates, rel=1e-9)
    assert found[0][1]["policy/reference_kl"] == pytest.approx(estimates, rel=1e-10)
    sequences = [sampled().minimised(gspo_torch.of_sequences(3e-4, 4e-4, kl, weight), 1)[0] for weight in (1.0, 2.0)]
    means = [sum(row) / sum(mask) for row, mask in zip(VECTORS["policy"]["kl_estimators_vs_ref"][kl],
                                                         VECTORS["policy"]["inputs"]["mask"], strict=True)]  # fmt: skip
    assert sequences[1] - sequences[0] == pytest.approx(sum(means), rel=1e-9)


def test_the_entropy_is_subtracted_by_its_weight():
    """Its value, and its gradient: as in torch."""
    terms = [tokens_term(weighted, entropy_weight=0.3), tokens_term(weighted)]
    (loss, metrics, _), (plain, _, _) = (sampled().minimised(term, 1, straight=False) for term in terms)
    assert plain - loss == pytest.approx(0.3 * metrics["policy/entropy"], rel=1e-12)
    rows, others = sampled(), sampled()
    for made, term in zip((rows, others), terms, strict=True):
        made.minimised(term, 1, straight=False)
    hidden_TV = rows.hidden_TV.detach().requires_grad_()
    logprob_TV = hidden_TV.log_softmax(-1)
    entropy_T = -(logprob_TV.exp() * logprob_TV).sum(-1)[rows.labels_T != IGNORE]
    (0.3 * entropy_T.sum()).backward()
    torch.testing.assert_close(others.hidden_TV.grad - rows.hidden_TV.grad, hidden_TV.grad, rtol=1e-9, atol=1e-12)
    sequences = [sampled().minimised(gspo_torch.of_sequences(3e-4, 4e-4, entropy_weight=each), 3, straight=False)
        for each in (0.0, 0.2)]  # fmt: skip
    assert sequences[0][0] - sequences[1][0] == pytest.approx(0.2 * sequences[1][1]["policy/entropy"], rel=1e-12)


def test_tokens_outside_of_the_limits_are_masked():
    logps, old = [[-0.1, -0.1, -2.0]], [[-3.0, -0.2, -0.1]]
    rows = Rows(logps, {OLD: old, ADVANTAGES: [[1.0, -1.0, 1.0]]}, [[0]])
    loss, metrics, slopes = rows.minimised(tokens_term(cispo_torch.weighted(0.5, 2.0, "mask")), 1)
    weight = math.exp(0.1)
    assert loss == pytest.approx(weight * -0.1) and slopes == [[0.0, pytest.approx(weight), 0.0]]
    assert metrics["policy/clipped"] == 2.0


def test_what_a_policy_measures():
    _, metrics, _ = sampled().minimised(tokens_term(clipped(0.2, 0.2)), 9)
    given = VECTORS["policy"]["inputs"]
    ratio = (torch.tensor(given["new_logps"]).double() - torch.tensor(given["old_logps"]).double()).exp()
    mask = torch.tensor(given["mask"]).bool()
    advantage = torch.tensor(given["advantages"]).double()[:, None].expand(3, 4)
    cut = ((advantage > 0) & (ratio > 1.2)) | ((advantage < 0) & (ratio < 0.8))
    assert metrics["policy/ratio"] == pytest.approx(ratio[mask].mean().item(), rel=1e-6)
    assert metrics["policy/clipped"] == pytest.approx(cut[mask].double().mean().item())
    assert metrics["policy/kl"] == pytest.approx((ratio - 1 - ratio.log())[mask].mean().item(), rel=1e-5)


def test_a_dual_clip_bounds_what_negative_advantages_cost():
    logps, old = [[-0.1, -0.1]], [[-3.0, -3.0]]
    rows = Rows(logps, {OLD: old, ADVANTAGES: [[-1.0, 1.0]]}, [[0]])
    loss, metrics, slopes = rows.minimised(tokens_term(clipped(0.2, 0.2, 3.0)), 1)
    assert loss == pytest.approx(3.0 - 1.2) and slopes == [[0.0, 0.0]]
    assert metrics["policy/clipped"] == 2.0
