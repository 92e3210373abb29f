"""`loss cpo { … }`: contrastive preference optimization (Xu et al. 2024, arXiv 2401.08417)."""

from collections.abc import Iterator
from typing import Literal

from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.losses import LOSSES, PairLoss, beta_setting, logits_chunk
from xtrain.dsl.schema.setting import Conflict, Range, not_negative, setting
from xtrain.dsl.values import Quantity
from xtrain.lazy_attrs import frozen


@LOSSES.register()
@frozen
class Cpo(PairLoss):
    """`loss cpo { … }`: preference for the chosen answer of a pair plus its cross-entropy; no reference."""

    kind: str = named("cpo")
    beta: float = beta_setting(0.1)
    form: Literal["sigmoid", "ipo", "hinge"] = setting(
        "form of the loss of the difference of both answers' log-probabilities, as in dpo", default="sigmoid"
    )
    label_smoothing: float = setting(
        "assumed share of pairs with swapped answers", default=0.0, check=Range(low=0, below=0.5)
    )
    alpha: float = setting(
        "weight of the cross-entropy of the chosen answer, mean over its tokens", default=1.0, check=not_negative
    )
    chunk: Quantity = logits_chunk()

    def conflicts(self) -> Iterator[Conflict]:
        if self.label_smoothing and self.form != "sigmoid":
            hint = "remove it, or write `form = sigmoid`"
            yield Conflict("label_smoothing", f"form {self.form} does not smooth labels", hint)

    def does(self) -> str:
        text = f"minimize {self.form} of both answers' log-probabilities of each pair, and {self.alpha:g} · the mean "
        return f"{text}cross-entropy of the chosen one, mean over all pairs of the step; the head is computed twice"
