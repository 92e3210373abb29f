"""`loss regression { … }`: rewards of single answers, by squared error to a given number."""

from collections.abc import Mapping
from typing import ClassVar

from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.losses import LOSSES, RewardLoss, Unit
from xtrain.lazy_attrs import frozen


@LOSSES.register()
@frozen
class Regression(RewardLoss):
    """`loss regression { … }`: a reward model that predicts each document's number `reward`, by squared error."""

    kind: str = named("regression")

    metrics: ClassVar[Mapping[str, tuple[str, str]]] = {
        "rewards/mean": ("reward by the model, mean over the sequences of the step", ""),
        "rewards/error": ("distance from the number `reward` of the document, mean over the sequences", ""),
    }

    @property
    def unit(self) -> Unit:
        return "sequence"

    @property
    def values(self) -> tuple[str, ...]:
        return ("reward",)

    def does(self) -> str:
        text = "minimize the squared distance of the reward of each sequence, at its last token, from its number "
        return f"{text}`reward`, mean over all sequences of the step"
