"""`optimizer sgd { … }`: stochastic gradient descent, with momentum as torch has it (Sutskever et al. 2013)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from xtrain.contracts.optimizers import PlannedOptimizer
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.optimizers import (
    OPTIMIZERS,
    Compiled,
    States,
    StateTensor,
    clip_norm,
    clip_spikes,
    clip_value,
    learning_rate,
    random_rounding,
    scheduled_decay,
    state_format,
)
from xtrain.dsl.schema.setting import Range, UsualRange, not_negative, setting
from xtrain.lazy_attrs import frozen


@OPTIMIZERS.register()
@frozen
class Sgd(PlannedOptimizer):
    """`optimizer sgd { … }`: stochastic gradient descent, with or without momentum."""

    kind: str = named("sgd")
    lr: float = learning_rate(UsualRange(1e-4, 1.0, "ResNet 0.1 (arXiv 1512.03385)"))
    momentum: float = setting("exponential decay of the momentum; 0: no momentum", default=0.9,
                              check=Range(low=0, below=1))  # fmt: skip
    nesterov: bool = setting("use Nesterov momentum", default=False)
    weight_decay: float = setting(
        "weight decay of matrices, added to their gradients (L2)", default=0.0, check=not_negative
    )
    scheduled_decay: bool = scheduled_decay()
    clip: float | None = clip_norm()
    clip_spikes: float | None = clip_spikes()
    clip_value: float | None = clip_value()
    states: States = state_format()
    stochastic_rounding: bool = random_rounding()

    compiled: ClassVar[Compiled] = "converted"
    elementwise: ClassVar[bool] = True

    def does(self, number_format: str) -> str:
        stored = self.stored(number_format)
        momentum = f"momentum {self.momentum:g} in {stored}" if self.momentum else f"no momentum, weights in {stored}"
        ahead = ", nesterov" if self.nesterov and self.momentum else ""
        return f"sgd, {momentum}{ahead}, weight decay {self.weight_decay:g} on matrices, added to the gradient"

    @classmethod
    def state(cls, args: Mapping[str, Any], name: str) -> tuple[StateTensor, ...]:
        return cls.moments(args, "momentum_buffer") if args["momentum"] else ()
