"""`loss kto { … }`: answers that are good or bad by themselves (Ethayarajh et al. 2024, arXiv 2402.01306)."""

from collections.abc import Mapping
from typing import ClassVar

from attrs import frozen

from ...dsl.quantity import Quantity
from ...dsl.schema.component import named
from ...dsl.schema.losses import (
    LOSSES,
    REF,
    Reference,
    ReferredLoss,
    Unit,
    beta_setting,
    logits_chunk,
    reference_setting,
)
from ...dsl.schema.setting import not_negative, positive, setting


@LOSSES.register()
@frozen
class Kto(ReferredLoss):
    """`loss kto { … }`: makes answers with `label` true likelier than a reference model does, and the others less
    likely."""

    kind: str = named("kto")
    beta: float = beta_setting(0.1)
    desirable: float = setting("weight of answers whose `label` is true", default=1.0, check=positive)
    undesirable: float = setting("weight of the others", default=1.0, check=positive)
    reference_point: float = setting(
        "what log-ratios of answers are compared with: z; the paper estimates it from answers to other prompts, and "
        "with 0 the loss is that of `apo_zero_unpaired` of TRL",
        default=0.0,
        check=not_negative,
    )
    reference: Reference = reference_setting()
    chunk: Quantity = logits_chunk()

    across: ClassVar[bool] = True
    metrics: ClassVar[Mapping[str, tuple[str, str]]] = {
        "rewards/margin": ("reward of answers, negative of those that are undesirable; mean over sequences", "nats"),
        "rewards/accuracy": ("answers whose reward has the sign of their label", "share, 0 to 1"),
    }
    resuming: ClassVar[Mapping[str, str]] = {"beta": "answers are judged with it from here on"}

    @property
    def unit(self) -> Unit:
        return "sequence"

    @property
    def columns(self) -> tuple[str, ...]:
        return (REF,)

    @property
    def values(self) -> tuple[str, ...]:
        return ("label",)

    def does(self) -> str:
        text = f"minimise 1 − σ({self.beta:g} · (r − {self.reference_point:g})) of each answer, or with the other sign "
        text += f"where its `label` is false, r the sum of log π − `{REF}`, weights {self.desirable:g} and "
        return f"{text}{self.undesirable:g}, mean over all sequences of the step; the head is computed twice"
