"""Common parts of policy losses."""

# shapes: T tokens of a rank, sampled by the policy

from collections.abc import Callable

import torch
from torch import Tensor

from xtrain.dsl.schema.losses import ADVANTAGES, OLD, REF
from xtrain.dsl.schema.policy import POLICY, REFERENCE_KL
from xtrain.runtime.base.state import KlWeight
from xtrain.runtime.nn.batch import SHARE
from xtrain.runtime.nn.loss import Term

Surrogate = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Function of current log-probabilities, ratios to the sampler's, and advantages, [T] each, that returns the loss of
each token and whether its ratio is clipped, which removes its gradient."""


def divergence(kl: str, logprob_T: Tensor, ref_T: Tensor) -> Tensor:
    """Estimate the divergence from a reference per token (Schulman, joschu.net/blog/kl-approx.html)."""
    d_T = ref_T - logprob_T
    if kl == "k1":
        return -d_T
    if kl == "k2":
        return d_T.square() / 2
    assert kl == "k3"
    return torch.expm1(d_T) - d_T


def measured(kl: str) -> tuple[str, ...]:
    """Return the names of metrics."""
    return (*POLICY, *(REFERENCE_KL if kl != "none" else ()))


def measures(log_ratio_T: Tensor, clipped_T: Tensor, entropy_T: Tensor) -> dict[str, Tensor]:
    """Return the metrics common to all policy losses."""
    log_ratio_T = log_ratio_T.detach()
    return {
        "policy/ratio": log_ratio_T.exp(),
        "policy/clipped": clipped_T.to(log_ratio_T.dtype),
        "policy/kl": torch.expm1(log_ratio_T) - log_ratio_T,
        "policy/entropy": entropy_T,
    }


def of_tokens(
    surrogate: Surrogate,
    *,
    kl: str,
    kl_weight: float,
    normalise: str,
    max_tokens: int | None = None,
    entropy_weight: float = 0.0,
) -> Term:
    """Return a loss of single tokens. Arguments as the settings of a `TokenPolicyLoss`."""

    weight = KlWeight(kl_weight)

    def loss(logprob_T: Tensor, entropy_T: Tensor, **columns: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        log_ratio_T = logprob_T - columns[OLD]
        loss_T, clipped_T = surrogate(logprob_T, log_ratio_T.exp(), columns[ADVANTAGES])
        found = measures(log_ratio_T, clipped_T, entropy_T)
        if kl != "none":
            kl_T = divergence(kl, logprob_T, columns[REF])
            loss_T = loss_T + weight.value * kl_T
            found["policy/reference_kl"] = kl_T
        if entropy_weight:
            loss_T = loss_T - entropy_weight * entropy_T
        if normalise == "sequence":
            loss_T = loss_T * columns[SHARE]
        elif normalise == "dr_grpo":
            assert max_tokens is not None
            loss_T = loss_T / max_tokens
        return loss_T, found

    columns = (OLD, ADVANTAGES, *((REF,) if kl != "none" else ()), *((SHARE,) if normalise == "sequence" else ()))
    return Term(loss, reads=("entropy_T",), columns=columns, metrics=measured(kl), kl_weight=weight)


def clipped(low: float, high: float, dual: float | None = None) -> Surrogate:
    """Return the surrogate −min(ρ A, clip(ρ, 1 − low, 1 + high) A) (PPO, arXiv 1707.06347), for A < 0 at most −`dual` ·
    A (arXiv 1912.09729)."""

    def surrogate(logprob_T: Tensor, ratio_T: Tensor, advantage_T: Tensor) -> tuple[Tensor, Tensor]:
        free_T, bound_T = ratio_T * advantage_T, ratio_T.clamp(1 - low, 1 + high) * advantage_T
        gain_T, clipped_T = torch.minimum(free_T, bound_T), bound_T < free_T
        if dual is not None:
            least_T = dual * advantage_T
            cut_T = (advantage_T < 0) & (gain_T < least_T)
            gain_T, clipped_T = torch.where(cut_T, least_T, gain_T), clipped_T | cut_T
        return -gain_T, clipped_T

    return surrogate
