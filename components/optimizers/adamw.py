"""`optimizer adamw { … }`: AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101)."""

from collections.abc import Mapping
from typing import Any, ClassVar

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
from xtrain.dsl.schema.setting import momentum_pair, positive, setting
from xtrain.lazy_attrs import frozen


@OPTIMIZERS.register()
@frozen
class AdamW(PlannedOptimizer):
    """`optimizer adamw { … }`: Adam with decoupled weight decay; none for norms, biases and embeddings."""

    kind: str = named("adamw")
    lr: float = learning_rate()
    betas: tuple[float, ...] = setting(
        "exponential decay of the two moments",
        default=(0.9, 0.95),
        check=momentum_pair,
        resuming="the optimizer takes it from the plan, and the moments follow within some steps",
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

    counts: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True
    scale_free: ClassVar[bool] = True
    compiled: ClassVar[Compiled] = "converted"

    def does(self, number_format: str) -> str:
        return f"adamw, two moments in {self.stored(number_format)}, {self.decayed(self.weight_decay)}"

    @classmethod
    def state(cls, args: Mapping[str, Any], name: str) -> tuple[StateTensor, ...]:
        return cls.moments(args, "exp_avg", "exp_avg_sq")
