"""`loss bradley_terry { … }`: rewards of pairs (Bradley and Terry 1952; Ouyang et al. 2022, arXiv 2203.02155)."""

from collections.abc import Mapping
from typing import ClassVar

from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.losses import LOSSES, PAIR_METRICS, RewardLoss, Unit
from xtrain.dsl.schema.setting import not_negative, setting
from xtrain.lazy_attrs import frozen


@LOSSES.register()
@frozen
class BradleyTerry(RewardLoss):
    """`loss bradley_terry { … }`: a reward model that gives the chosen answer of a pair a higher reward than the
    rejected one."""

    kind: str = named("bradley_terry")
    margin: bool = setting(
        "the reward of the chosen answer must be higher by the number `margin` of each pair (Llama 2, arXiv "
        "2307.09288, section 3.2.2)",
        default=False,
        resuming="pairs are compared differently from here on",
    )
    centre: float = setting(
        "weight of the squared sum of both rewards, which keeps their mean at 0 (arXiv 2312.09244)",
        default=0.0,
        check=not_negative,
        resuming="rewards are kept at 0 by it from here on",
    )

    may_read: ClassVar[Mapping[str, str]] = {"margin": "margin = true"}
    metrics: ClassVar[Mapping[str, tuple[str, str]]] = PAIR_METRICS

    @property
    def unit(self) -> Unit:
        return "pair"

    @property
    def values(self) -> tuple[str, ...]:
        return ("margin",) if self.margin else ()

    def does(self) -> str:
        margin = " − `margin`" if self.margin else ""
        centre = f" + {self.centre:g} · (r_chosen + r_rejected)²" if self.centre else ""
        text = f"minimize −log σ(r_chosen − r_rejected{margin}){centre} of each pair, r the rewards of both answers at "
        return f"{text}their last tokens; mean over all pairs of the step"
