"""`loss cross_entropy { … }`: −log p of each label, or of labels that are smoothed (Szegedy et al. 2016, §7)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from ...dsl.quantity import Quantity
from ...dsl.schema.component import named
from ...dsl.schema.setting import Range, setting
from ...dsl.schema.training import LOSSES, Loss, logits_chunk, z_weight


@LOSSES.register(default=True)
@frozen
class CrossEntropy(Loss):
    """`loss cross_entropy { … }`: −log p of each label, or of labels that are smoothed."""

    kind: str = named("cross_entropy")
    z_loss: float = z_weight()
    label_smoothing: float = setting(
        "share of each label that is spread evenly over the vocabulary, as in torch's `cross_entropy`",
        default=0.0,
        check=Range(low=0, below=1),
        added=True,
    )
    chunk: Quantity = logits_chunk()

    resuming: ClassVar[Mapping[str, str]] = {"label_smoothing": "labels are smoothed by it from here on"}

    @property
    def plain(self) -> bool:
        return not self.label_smoothing

    def does(self) -> str:
        even = f"{self.label_smoothing:g} of each label spread evenly over the vocabulary"
        return f"minimise cross-entropy with {even}; `loss` stays the plain one"

    @classmethod
    def reads(cls, args: Mapping[str, Any]) -> tuple[str, ...]:
        return ("mean_logprob_T",) if args["label_smoothing"] else ()
