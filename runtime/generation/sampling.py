"""Which token follows: the likeliest one, or one drawn from those that temperature, top-k, top-p and min-p leave.

Shapes: B rows, V vocabulary, N candidates.
"""

import math
import random
from collections.abc import Sequence
from typing import Final, Self

import torch
from attrs import frozen
from torch import Tensor

NO_TOKEN: Final = -1


@frozen(kw_only=True)
class Sampling:
    """How tokens are drawn.

    temperature: logits are divided by it; 0: the likeliest token. top_k: from so many of the likeliest; None: from
    all. top_p: from the fewest that have this share of the probability together (Holtzman et al. 2020, arXiv
    1904.09751). min_p: from those with at least this share of the probability of the likeliest (Nguyen et al. 2024,
    arXiv 2407.01082). seed: of the draws of every row, which are then the same whatever other rows there are.

    Raises ValueError for numbers that are none of these.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        wrong = {
            "temperature must be 0 or above, and finite": not 0 <= self.temperature < math.inf,
            "top_k must be at least 1": self.top_k is not None and self.top_k < 1,
            "top_p must lie above 0 and at most at 1": not 0 < self.top_p <= 1,
            "min_p must lie between 0 and 1": not 0 <= self.min_p <= 1,
        }
        if problem := next((each for each, found in wrong.items() if found), None):
            raise ValueError(problem)

    def candidates(self, logits_BV: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weights [B, N], 0 of what is left out, and the tokens that they are of; None: all in order.

        One setting works on what those before have left, in the order of the attributes.
        """
        scores_BN, tokens_BN = logits_BV / self.temperature, None
        if self.top_k is not None and self.top_k < logits_BV.shape[1]:
            scores_BN, tokens_BN = scores_BN.topk(self.top_k)
        elif self.top_p < 1:
            scores_BN, tokens_BN = scores_BN.sort(descending=True)
        weights_BN = scores_BN.softmax(-1)
        if self.top_p < 1:
            before_BN = running_sums(weights_BN) - weights_BN
            weights_BN = weights_BN * (before_BN < self.top_p)
        if self.min_p:
            weights_BN = weights_BN * (weights_BN >= self.min_p * weights_BN.amax(-1, keepdim=True))
        return weights_BN, tokens_BN

    def left_out(self, logits_BV: Tensor, logprob_BV: Tensor) -> Tensor:
        """The probability [B] of what is no candidate. logprob_BV: of logits / temperature."""
        if self.top_k is None and self.top_p == 1 and not self.min_p:
            return logprob_BV.new_zeros(len(logprob_BV))
        weights_BN, tokens_BN = self.candidates(logits_BV)
        chances_BN = logprob_BV.exp() if tokens_BN is None else logprob_BV.gather(1, tokens_BN).exp()
        return (1 - (chances_BN * (weights_BN > 0)).sum(-1)).clamp_(min=0)


@frozen(eq=False)
class Draws:
    """The draws of a batch of rows, each with a generator of its own."""

    sampling: Sampling
    generators: Sequence[random.Random]

    @classmethod
    def of(cls, sampling: Sampling, rows: int) -> Self:
        return cls(sampling, [random.Random(sampling.seed) for _ in range(rows)])

    def next(self, logits_BV: Tensor) -> Tensor:
        """A token [B] for every row; NO_TOKEN where logits are NaN or infinite. A row takes one random number, whatever
        there is to choose from."""
        best_B1 = logits_BV.amax(-1, keepdim=True)
        known_B1 = best_B1.isfinite()  # others may be -inf, as of tokens that never follow
        if self.sampling.temperature == 0:
            tokens_B = logits_BV.argmax(-1)
        else:  # below the largest, so that none is too large when it is divided by a low temperature
            tokens_B = self._drawn((logits_BV - best_B1).where(known_B1, 0))
        return tokens_B.where(known_B1[:, 0], NO_TOKEN)

    def _drawn(self, logits_BV: Tensor) -> Tensor:
        exact = logits_BV if logits_BV.dtype == torch.float64 else logits_BV.float()
        weights_BN, tokens_BN = self.sampling.candidates(exact)
        ends_BN = running_sums(weights_BN, torch.float64)
        shares_B = torch.tensor([each.random() for each in self.generators], dtype=torch.float64)
        whole_B1 = ends_BN[:, -1:]
        # Below the whole, so that a candidate of weight 0 behind the last one is never hit.
        targets_B1 = torch.minimum(shares_B.to(whole_B1.device)[:, None] * whole_B1, whole_B1.nextafter(0 * whole_B1))
        places_B1 = torch.searchsorted(ends_BN, targets_B1, right=True)
        return (places_B1 if tokens_BN is None else tokens_BN.gather(1, places_B1))[:, 0]


def running_sums(x_BN: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Along the last dim. CUDA has no algorithm that gives the same each time: where no other may be, the host sums."""
    if x_BN.is_cuda and torch.are_deterministic_algorithms_enabled():
        return x_BN.cpu().cumsum(-1, dtype=dtype).to(x_BN.device)
    return x_BN.cumsum(-1, dtype=dtype)
