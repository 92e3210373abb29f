"""`loss cross_entropy { … }`: −log p of each label, optionally with label smoothing (Szegedy et al. 2016, §7), weights,
or focal (Lin et al. 2017, arXiv 1708.02002)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.losses import LOSSES, WEIGHTS, Loss, logits_chunk, z_weight
from xtrain.dsl.schema.setting import Range, not_negative, setting
from xtrain.dsl.values import Quantity
from xtrain.lazy_attrs import frozen


@LOSSES.register()
@frozen
class CrossEntropy(Loss):
    """`loss cross_entropy { … }`: −log p of each label, optionally with label smoothing."""

    kind: str = named("cross_entropy")
    z_loss: float = z_weight()
    label_smoothing: float = setting(
        "share of each label that is spread evenly over the vocabulary, as in torch's `cross_entropy`",
        default=0.0,
        check=Range(low=0, below=1),
        added=True,
        resuming="labels are smoothed by it from here on",
    )
    weighted: bool = setting(
        "multiply the loss of each token by its number in the column `weights` of the dataset; the sum is still "
        "divided by the number of valid tokens",
        default=False,
        added=True,
        resuming="tokens are weighted differently from here on",
    )
    focal: float = setting(
        "γ of the focal loss: −log p of a label is multiplied by (1 − p)^γ (arXiv 1708.02002)",
        default=0.0,
        check=not_negative,
        added=True,
        resuming="confident labels are weighted by it from here on",
    )
    dynamic: bool = setting(
        "multiply −log p of a label by p, which has no gradient: dynamic fine-tuning (arXiv 2508.05629)",
        default=False,
        added=True,
        resuming="unlikely labels are weighted less from here on",
    )
    chunk: Quantity = logits_chunk()

    may_read: ClassVar[Mapping[str, str]] = {WEIGHTS: "weighted = true"}

    @property
    def plain(self) -> bool:
        return not (self.label_smoothing or self.weighted or self.focal or self.dynamic)

    @property
    def columns(self) -> tuple[str, ...]:
        return (WEIGHTS,) if self.weighted else ()

    def args(self) -> dict[str, Any]:
        return {name: value for name, value in super().args().items() if value}  # without 0 and false

    def does(self) -> str:
        ways = [f"{self.label_smoothing:g} of each label spread evenly over the vocabulary"] * bool(
            self.label_smoothing
        )
        ways += [f"−log p of a label times (1 − p)^{self.focal:g}"] * bool(self.focal)
        ways += ["−log p of a label times p, which has no gradient"] * self.dynamic
        ways += [f"each token times its weight in `{WEIGHTS}`"] * self.weighted
        return f"minimize cross-entropy with {', '.join(ways)}; `loss` is the plain cross-entropy"

    @classmethod
    def reads(cls, args: Mapping[str, Any]) -> tuple[str, ...]:
        return ("mean_logprob_T",) if args.get("label_smoothing") else ()
