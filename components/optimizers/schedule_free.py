"""`optimizer schedule_free { … }`: AdamW without a schedule (Defazio et al. 2024, arXiv 2405.15682)."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from xtrain.contracts.optimizers import PlannedOptimizer
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.optimizers import (
    OPTIMIZERS,
    Compiled,
    StateTensor,
    clip_norm,
    clip_spikes,
    clip_value,
    decoupled_decay,
    learning_rate,
)
from xtrain.dsl.schema.setting import Conflict, momentum_pair, positive, setting
from xtrain.dsl.spec import Spec
from xtrain.dsl.values import Quantity
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture

if TYPE_CHECKING:
    from xtrain.plan.mesh import Layout


@OPTIMIZERS.register()
@frozen
class ScheduleFree(PlannedOptimizer):
    """`optimizer schedule_free { … }`: AdamW that averages its weights instead of lowering the learning rate; gradients
    are computed between the average and the newest weights."""

    kind: str = named("schedule_free")
    lr: float = learning_rate()
    betas: tuple[float, ...] = setting(
        "share of the average in the weights at which gradients are computed; decay of squared gradients",
        default=(0.9, 0.95),
        check=momentum_pair,
        resuming="the optimizer takes it from the plan, and gradients are computed at other weights from here on",
    )
    eps: float = setting("added to the denominator for numerical stability", default=1e-8, check=positive)
    weight_decay: float = decoupled_decay(0.1)
    clip: float | None = clip_norm()
    clip_spikes: float | None = clip_spikes()
    clip_value: float | None = clip_value()

    compiled: ClassVar[Compiled] = "always"
    counts: ClassVar[bool] = True
    temporaries: ClassVar[int] = 3
    before_forward: ClassVar[str] = "move weights to the point between average and newest, where gradients are computed"

    def does(self, number_format: str) -> str:
        return (
            f"schedule_free: adamw with averaged weights; newest weights and a moment in {number_format}, weight "
            f"decay {self.weight_decay:g} on matrices"
        )

    @classmethod
    def state(cls, args: Mapping[str, Any], name: str) -> tuple[StateTensor, ...]:
        return (StateTensor("z", begins="weights"), StateTensor("exp_avg_sq"))

    @classmethod
    def scalars(cls, args: Mapping[str, Any], name: str) -> tuple[str, ...]:
        return ("step", "weight_sum", "largest_lr")

    @classmethod
    def converts(cls, args: Mapping[str, Any]) -> bool:
        return True

    def conflicts(self, spec: Spec, architecture: Architecture, layout: "Layout") -> Iterator[Conflict]:
        from xtrain.planner.graph.saving import on_nan

        if spec.scheduler.falls(spec.optimizer.lr):
            message = (
                f"`{self.kind}` averages weights instead of lowering the learning rate, as {spec.scheduler.kind} does"
            )
            yield Conflict("kind", message, "use scheduler constant, with a warm-up")
        if not self.betas[0]:
            yield Conflict("betas", "gradients would be computed without the average", "use betas [0.9, 0.95]")
        if spec.precision.params == "bf16":
            message = "bf16 rounds away the small updates of an average of weights"
            yield Conflict("kind", message, "use precision { params = fp32, compute = bf16 }")
        each_step = (tick.actions for tick in spec.ticks if tick.every == Quantity(1, "steps"))
        policy = on_nan(spec)
        if policy.bears and not any(action.ends_at_bad for actions in each_step for action in actions):
            message = "a skipped step would leave the weights at the point of its gradients"
            instead = "write `on nan rollback`" if policy.action.goes_back else "remove `on nan … skip`"
            yield Conflict("kind", message, f"{instead}, or use optimizer adamw")
