"""`optimizer lion { … }`: Lion (Chen et al. 2023, arXiv 2302.06675)."""

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
from xtrain.dsl.schema.setting import UsualRange, momentum_pair, setting
from xtrain.lazy_attrs import frozen


@OPTIMIZERS.register()
@frozen
class Lion(PlannedOptimizer):
    """`optimizer lion { … }`: updates by the sign of a momentum; needs about a tenth of AdamW's learning rate."""

    kind: str = named("lion")
    lr: float = learning_rate(UsualRange(1e-7, 3e-3, "a third to a tenth of AdamW's (arXiv 2302.06675)"))
    betas: tuple[float, ...] = setting(
        "exponential decay of the average: in the update, and for the next step", default=(0.9, 0.99),
        check=momentum_pair,
    )  # fmt: skip
    weight_decay: float = decoupled_decay(1.0, UsualRange(0.0, 10.0, "3 to 10 times AdamW's (arXiv 2302.06675)"))
    cautious_decay: bool = cautious_decay()
    scheduled_decay: bool = scheduled_decay()
    clip: float | None = clip_norm()
    clip_spikes: float | None = clip_spikes()
    clip_value: float | None = clip_value()
    states: States = state_format()
    stochastic_rounding: bool = random_rounding()

    scale_free: ClassVar[bool] = True
    compiled: ClassVar[Compiled] = "always"
    elementwise: ClassVar[bool] = True

    def does(self, number_format: str) -> str:
        return f"lion, one average in {self.stored(number_format)}, {self.decayed(self.weight_decay)}"

    @classmethod
    def state(cls, args: Mapping[str, Any], name: str) -> tuple[StateTensor, ...]:
        return cls.moments(args, "exp_avg")
