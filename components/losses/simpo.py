"""`loss simpo { … }`: preferences without a reference, by means over tokens (Meng et al. 2024, arXiv 2405.14734)."""

from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.losses import LOSSES, PairLoss, beta_setting, logits_chunk
from xtrain.dsl.schema.setting import not_negative, setting
from xtrain.dsl.values import Quantity
from xtrain.lazy_attrs import frozen


@LOSSES.register()
@frozen
class Simpo(PairLoss):
    """`loss simpo { … }`: preference for the chosen answer of a pair by a margin of mean log-probabilities; no
    reference."""

    kind: str = named("simpo")
    beta: float = beta_setting(2.0)
    gamma: float = setting("margin γ of the chosen answer", default=1.0, check=not_negative)
    chunk: Quantity = logits_chunk()

    def does(self) -> str:
        text = f"minimize −log σ({self.beta:g} · (a − b) − {self.gamma:g}) of each pair, a and b the mean "
        return f"{text}log-probabilities of its answers, mean over all pairs of the step; the head is computed twice"
