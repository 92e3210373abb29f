"""The losses of the protocol: of each token a number, which nothing divides.

Shapes: T targets of the rows of a microbatch, of one position there may be several.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from attrs import frozen
from torch import Tensor

from xtrain.runtime.models.loss import Term
from xtrain.server.engine import CISPO, CROSS_ENTROPY, DRO, IMPORTANCE_SAMPLING, PPO, TARGETS, LossInput, LossOffer

WEIGHTS: Final = "weights"
SAMPLED: Final = "logprobs"
ADVANTAGES: Final = "advantages"
Settings = Mapping[str, Any]
OfTokens = Callable[[Tensor, Mapping[str, Tensor], Settings], Tensor]
"""(log-probabilities of targets now, the columns, settings) → the loss of each, [T]."""


@frozen(kw_only=True)
class WireLoss:
    """A loss that clients ask for by name. usual: its settings, with what they are where a client says nothing."""

    of_tokens: OfTokens
    columns: tuple[str, ...]
    usual: Mapping[str, float]
    wide: bool = False

    @property
    def offer(self) -> LossOffer:
        inputs = (LossInput(name=TARGETS, integer=True), *(LossInput(name=name) for name in self.columns))
        return LossOffer(inputs=inputs, settings=frozenset(self.usual), wide=self.wide)

    def term(self, settings: Settings) -> Term:
        """What the head minimises."""
        chosen = {**self.usual, **settings}

        def function(logprob_T: Tensor, **columns: Tensor) -> Tensor:
            return self.of_tokens(logprob_T, columns, chosen)

        return Term(function, columns=self.columns)

    def sum(self, logprobs: Tensor, columns: Mapping[str, Tensor], settings: Settings) -> float:
        """Over all targets, from their log-probabilities."""
        return float(self.of_tokens(logprobs, columns, {**self.usual, **settings}).sum())


def _cross_entropy(logprob_T: Tensor, columns: Mapping[str, Tensor], settings: Settings) -> Tensor:
    """−log π · weight, whatever the sign of the weight."""
    return -logprob_T * columns[WEIGHTS]


def _ratio(logprob_T: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    return (logprob_T - columns[SAMPLED]).exp()


def _importance_sampling(logprob_T: Tensor, columns: Mapping[str, Tensor], settings: Settings) -> Tensor:
    """−ρ A, ρ being the ratio of probabilities now and when it was sampled."""
    return -_ratio(logprob_T, columns) * columns[ADVANTAGES]


def _ppo(logprob_T: Tensor, columns: Mapping[str, Tensor], settings: Settings) -> Tensor:
    """−min(ρ A, clip(ρ) A) (arXiv 1707.06347); the thresholds are ratios."""
    ratio_T, advantage_T = _ratio(logprob_T, columns), columns[ADVANTAGES]
    clipped_T = ratio_T.clamp(settings[LOW], settings[HIGH])
    return -torch.minimum(ratio_T * advantage_T, clipped_T * advantage_T)


def _cispo(logprob_T: Tensor, columns: Mapping[str, Tensor], settings: Settings) -> Tensor:
    """−clip(ρ) A log π, the ratio being a weight without gradient (arXiv 2506.13585)."""
    weight_T = _ratio(logprob_T, columns).detach().clamp(settings[LOW], settings[HIGH])
    return -weight_T * columns[ADVANTAGES] * logprob_T


def _dro(logprob_T: Tensor, columns: Mapping[str, Tensor], settings: Settings) -> Tensor:
    """−(A log π − β/2 (log ρ)²) (arXiv 2405.19107), of each token."""
    square_T = (logprob_T - columns[SAMPLED]).square()
    return -(columns[ADVANTAGES] * logprob_T - settings[BETA] / 2 * square_T)


LOW: Final = "clip_low_threshold"
HIGH: Final = "clip_high_threshold"
BETA: Final = "beta"
_POLICY: Final = (SAMPLED, ADVANTAGES)
_CLIPPED: Final = {LOW: 0.8, HIGH: 1.2}

LOSSES: Final[dict[str, WireLoss]] = {
    CROSS_ENTROPY: WireLoss(of_tokens=_cross_entropy, columns=(WEIGHTS,), usual={}, wide=True),
    IMPORTANCE_SAMPLING: WireLoss(of_tokens=_importance_sampling, columns=_POLICY, usual={}),
    PPO: WireLoss(of_tokens=_ppo, columns=_POLICY, usual=_CLIPPED),
    CISPO: WireLoss(of_tokens=_cispo, columns=_POLICY, usual=_CLIPPED),
    DRO: WireLoss(of_tokens=_dro, columns=_POLICY, usual={BETA: 0.05}),
}
