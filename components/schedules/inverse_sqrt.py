"""`scheduler inverse_sqrt { … }`: the peak times √(warm-up / step) (Vaswani et al. 2017, arXiv 1706.03762)."""

from collections.abc import Callable, Mapping
from typing import Any

from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.optimizers import SCHEDULERS, Curve, Scheduler, warm_up
from xtrain.dsl.schema.setting import at_least, setting
from xtrain.dsl.values import Quantity
from xtrain.lazy_attrs import frozen
from xtrain.plan.learning_rate import length_in_steps


@SCHEDULERS.register()
@frozen
class InverseSqrt(Scheduler):
    """`scheduler inverse_sqrt { … }`: falls with the square root of the step, independent of the budget.

    lr · √(t / (s − W + t)) at step s after a warm-up of W steps, with t the timescale.
    """

    kind: str = named("inverse_sqrt")
    warmup: Quantity = warm_up()
    timescale: int | None = setting(
        "steps after the warm-up until the rate is 1/√2 of the peak; none: as many as the warm-up, or 10,000 without "
        "one",
        default=None, check=at_least(1), example="10_000",
    )  # fmt: skip

    def args(self) -> dict[str, Any]:
        return {"timescale": self.timescale}

    @classmethod
    def rate(cls, args: Mapping[str, Any], total: float) -> Curve:
        lr, warmup = args["lr"], length_in_steps(args["warmup"], total)
        scale = args["timescale"] or warmup or 10_000

        def rate(index: float) -> float:
            s = index + 1
            return lr * s / warmup if s <= warmup else lr * (scale / (s - warmup + scale)) ** 0.5

        return rate

    @classmethod
    def in_steps(cls, args: Mapping[str, Any]) -> bool:
        return args["timescale"] is not None or not any(args["warmup"].values())

    @classmethod
    def shown(cls, args: Mapping[str, Any], length: Callable[[str], str]) -> list[str]:
        steps = args["steps"]
        if steps is None or "steps" not in args["warmup"]:
            return ["then with 1/√step"]
        return [f"1/√step to {cls.rate(args, steps)(steps - 1):.3g} at step {steps:,}"]
