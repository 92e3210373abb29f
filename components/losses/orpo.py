"""`loss orpo { … }`: odds-ratio preference plus cross-entropy (Hong et al. 2024, arXiv 2403.07691)."""

from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.losses import LOSSES, PairLoss, beta_setting, logits_chunk
from xtrain.dsl.values import Quantity
from xtrain.lazy_attrs import frozen


@LOSSES.register()
@frozen
class Orpo(PairLoss):
    """`loss orpo { … }`: the cross-entropy of chosen answers, and their odds against the rejected ones; no
    reference."""

    kind: str = named("orpo")
    beta: float = beta_setting(
        0.1,
        "weight of the odds ratio relative to the cross-entropy: λ of the paper",
        "odds ratios are weighted by it from here on",
    )
    chunk: Quantity = logits_chunk()

    def does(self) -> str:
        text = f"minimize the mean cross-entropy of the chosen answer of each pair − {self.beta:g} · log σ of the "
        return f"{text}log odds ratio of both answers, mean over all pairs of the step; the head is computed twice"
