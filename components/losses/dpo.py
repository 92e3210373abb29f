"""`loss dpo { … }`: direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290), and its variants."""

from collections.abc import Iterator
from typing import Literal

from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.losses import (
    LOSSES,
    REF,
    PairLoss,
    Reference,
    ReferredLoss,
    beta_setting,
    logits_chunk,
    reference_setting,
)
from xtrain.dsl.schema.setting import Conflict, Range, setting
from xtrain.dsl.values import Quantity
from xtrain.lazy_attrs import frozen


@LOSSES.register()
@frozen
class Dpo(ReferredLoss, PairLoss):
    """`loss dpo { … }`: preference for the chosen answer of a pair over the rejected one, relative to a reference
    model."""

    kind: str = named("dpo")
    beta: float = beta_setting(0.1)
    form: Literal["sigmoid", "ipo", "hinge", "robust"] = setting(
        "form of the loss of the difference d of both answers' log-ratios to the reference: sigmoid: −log σ(βd); ipo: "
        "(d − 1/(2β))², of means over tokens (arXiv 2310.12036); hinge: max(0, 1 − βd) (arXiv 2305.10425); robust: "
        "sigmoid corrected for a share `label_smoothing` of pairs with swapped answers (arXiv 2403.00409)",
        default="sigmoid",
    )
    label_smoothing: float = setting(
        "assumed share of pairs with swapped answers", default=0.0, check=Range(low=0, below=0.5)
    )
    length_normalised: bool = setting("log-ratios are means over tokens instead of sums", default=False)
    reference: Reference = reference_setting()
    chunk: Quantity = logits_chunk()

    @property
    def columns(self) -> tuple[str, ...]:
        return (REF,)

    def conflicts(self) -> Iterator[Conflict]:
        if self.label_smoothing and self.form in ("ipo", "hinge"):
            hint = "remove it, or write `form = robust`"
            yield Conflict("label_smoothing", f"form {self.form} does not smooth labels", hint)
        if self.form == "robust" and not self.label_smoothing:
            hint = "add `label_smoothing = 0.1`, or write `form = sigmoid`"
            yield Conflict("form", "robust corrects for `label_smoothing`, and that is 0", hint)
        if self.length_normalised and self.form == "ipo":
            yield Conflict("length_normalised", "ipo already uses means over tokens", "remove it")

    def does(self) -> str:
        of = "means over their tokens" if self.length_normalised or self.form == "ipo" else "sums over their tokens"
        text = f"minimize {self.form} of the two answers of each pair, by {of} of log π − `{REF}`"
        return f"{text}, mean over all pairs of the step; the head is computed twice"
