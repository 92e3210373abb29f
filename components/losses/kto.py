"""`loss kto { … }`: answers labeled good or bad (Ethayarajh et al. 2024, arXiv 2402.01306)."""

from collections.abc import Iterator, Mapping
from typing import ClassVar, Final, Literal

from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.losses import (
    LOSSES,
    PRECOMPUTED,
    REF,
    Reference,
    ReferredLoss,
    Unit,
    beta_setting,
    logits_chunk,
    reference_setting,
)
from xtrain.dsl.schema.setting import Conflict, not_negative, positive, setting
from xtrain.dsl.values import Quantity
from xtrain.lazy_attrs import frozen

POINT: Final = "rewards/reference_point"


@LOSSES.register()
@frozen
class Kto(ReferredLoss):
    """`loss kto { … }`: makes answers with `label` true likelier than a reference model does, and the others less
    likely."""

    kind: str = named("kto")
    beta: float = beta_setting(0.1, resuming="answers are judged with it from here on")
    desirable: float = setting("weight of answers whose `label` is true", default=1.0, check=positive)
    undesirable: float = setting("weight of the others", default=1.0, check=positive)
    reference_point: float | Literal["estimated"] = setting(
        "reference point z of log-ratios; estimated: in each step from answers to other prompts, as in the paper; 0: "
        "the loss `apo_zero_unpaired` of TRL",
        default=0.0,
        check=not_negative,
    )
    reference: Reference = reference_setting()
    chunk: Quantity = logits_chunk()

    across: ClassVar[bool] = True
    metrics: ClassVar[Mapping[str, tuple[str, str]]] = {
        POINT: ("with `reference_point = estimated`: reference point of log-ratios in the step", "nats"),
        "rewards/margin": ("reward of answers, negated for undesirable answers; mean over sequences", "nats"),
        "rewards/accuracy": ("share of answers whose reward has the sign of their label", "share, 0 to 1"),
    }

    @property
    def unit(self) -> Unit:
        return "sequence"

    @property
    def columns(self) -> tuple[str, ...]:
        return (REF,)

    @property
    def values(self) -> tuple[str, ...]:
        return ("label",)

    @property
    def mismatched(self) -> bool:
        return self.reference_point == "estimated"

    @property
    def measured(self) -> tuple[str, ...]:
        return tuple(name for name in self.metrics if name != POINT or self.mismatched)

    def conflicts(self) -> Iterator[Conflict]:
        if self.mismatched and self.reference == PRECOMPUTED:
            message = (
                "`reference_point = estimated` needs log-probabilities of the reference for answers to other prompts, "
                "and no "
            )
            hint = "choose another `reference`, or write a number for `reference_point`"
            yield Conflict("reference_point", f"{message}dataset has them", hint)

    def does(self) -> str:
        point = "z" if isinstance(self.reference_point, str) else f"{self.reference_point:g}"
        text = f"minimize 1 − σ({self.beta:g} · (r − {point})) of each answer, or with the other sign "
        text += f"if its `label` is false, r the sum of log π − `{REF}`, weights {self.desirable:g} and "
        return f"{text}{self.undesirable:g}, mean over all sequences of the step; the head is computed twice"
