"""`optimizer ademamix { … }`: AdEMAMix (Pagliardini et al. 2024, arXiv 2409.03137)."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from xtrain.contracts.optimizers import PlannedOptimizer
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.optimizers import (
    OPTIMIZERS,
    Compiled,
    States,
    StateTensor,
    cautious_decay,
    clip_norm,
    clip_spikes,
    clip_value,
    decoupled_decay,
    learning_rate,
    random_rounding,
    scheduled_decay,
    state_format,
)
from xtrain.dsl.schema.setting import at_least, momentum_pair, not_negative, positive, proper_fraction, setting
from xtrain.lazy_attrs import frozen

if TYPE_CHECKING:
    from xtrain.dsl.spec import Spec


@OPTIMIZERS.register()
@frozen
class AdEMAMix(PlannedOptimizer):
    """`optimizer ademamix { … }`: AdamW whose momentum is joined by a second, much slower average of the gradients."""

    kind: str = named("ademamix")
    lr: float = learning_rate()
    betas: tuple[float, ...] = setting(
        "exponential decay of the two moments",
        default=(0.9, 0.999),
        check=momentum_pair,
        resuming="the optimizer takes it from the plan, and the moments follow within some steps",
    )
    beta3: float = setting("exponential decay of the slow average", default=0.9999, check=proper_fraction)
    alpha: float = setting("weight of the slow average in an update", default=5.0, check=not_negative)
    alpha_warmup: int | None = setting(
        "updates in which `alpha` grows linearly from 0; none: it is constant. The paper takes all steps of the run",
        default=None,
        check=at_least(1),
        example="10_000",
    )
    beta3_warmup: int | None = setting(
        "updates in which the half-life of the slow average grows linearly from the momentum's; none: it is constant. "
        "The paper takes all steps of the run",
        default=None,
        check=at_least(1),
        example="10_000",
    )
    eps: float = setting("added to the denominator for numerical stability", default=1e-8, check=positive)
    weight_decay: float = decoupled_decay(0.1)
    cautious_decay: bool = cautious_decay()
    scheduled_decay: bool = scheduled_decay()
    clip: float | None = clip_norm()
    clip_spikes: float | None = clip_spikes()
    clip_value: float | None = clip_value()
    states: States = state_format()
    stochastic_rounding: bool = random_rounding()

    scale_free: ClassVar[bool] = True
    counts: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True
    compiled: ClassVar[Compiled] = "always"

    def idle(self, spec: "Spec") -> Iterator[tuple[str, str]]:
        yield from super().idle(spec)
        if not self.alpha:
            yield from ((name, "`alpha` is 0") for name in ("beta3", "alpha_warmup", "beta3_warmup"))

    def does(self, number_format: str) -> str:
        return (
            f"ademamix, adamw with a slow average ({self.beta3:g}) of weight {self.alpha:g}; three moments in "
            f"{self.stored(number_format)}, {self.decayed(self.weight_decay)}"
        )

    @classmethod
    def state(cls, args: Mapping[str, Any], name: str) -> tuple[StateTensor, ...]:
        return cls.moments(args, "exp_avg", "exp_avg_slow", "exp_avg_sq")
