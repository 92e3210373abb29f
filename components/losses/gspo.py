"""`loss gspo { … }`: group sequence policy optimization (Zheng et al. 2025, arXiv 2507.18071), over data."""

from collections.abc import Mapping
from typing import ClassVar

from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.losses import ADVANTAGES, LOSSES, OLD, Unit
from xtrain.dsl.schema.policy import POLICY_METRICS, PolicyLoss
from xtrain.dsl.schema.setting import Range, not_negative, setting
from xtrain.lazy_attrs import frozen


@LOSSES.register()
@frozen
class Gspo(PolicyLoss):
    """`loss gspo { … }`: the clipped ratio of whole sequences, from the mean log-ratio of their tokens."""

    kind: str = named("gspo")
    clip_low: float = setting(
        "ratios are clipped at 1 − this",
        default=3e-4,
        check=Range(low=0, below=1),
        resuming="ratios are clipped by it from here on",
    )
    clip_high: float = setting("ratios are clipped at 1 + this", default=4e-4, check=not_negative)

    across: ClassVar[bool] = True
    metrics: ClassVar[Mapping[str, tuple[str, str]]] = POLICY_METRICS

    @property
    def unit(self) -> Unit:
        return "sequence"

    @property
    def summed(self) -> int:
        return super().summed + (self.kl != "none")

    def does(self) -> str:
        clips = f"clipped to {1 - self.clip_low:g} … {1 + self.clip_high:g}"
        text = f"minimize −ρA of each sequence, log ρ the mean of log π − `{OLD}` over its tokens, {clips}, A the mean "
        return f"{text}of `{ADVANTAGES}`{self.penalty()}; mean over sequences; the head is computed twice"
