"""`scheduler wsd { … }`: warm-up, stable, decay (Hu et al. 2024, arXiv 2404.06395)."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.optimizers import SCHEDULERS, Curve, Scheduler, floor_of_peak, warm_up
from xtrain.dsl.schema.setting import setting, share
from xtrain.dsl.values import Quantity
from xtrain.lazy_attrs import frozen
from xtrain.plan.learning_rate import decay_text, length_in_steps, warmup_and_decay


@SCHEDULERS.register()
@frozen
class Wsd(Scheduler):
    """`scheduler wsd { … }`: warm-up, a stable phase at the peak, and a final decay to the floor."""

    kind: str = named("wsd")
    warmup: Quantity = warm_up()
    floor: Quantity = floor_of_peak()
    decay: Quantity = setting(
        "length of the final decay", default=Quantity(10, "%"), units=("steps", "tokens", "epochs", "%"), check=share
    )
    shape: Literal["linear", "cosine", "sqrt"] = setting("shape of the final decay", default="linear")

    at_end: ClassVar[tuple[str, ...]] = ("decay",)

    def lengths(self) -> dict[str, Quantity]:
        return {"warmup": self.warmup, "decay": self.decay}

    def idle(self) -> dict[str, str]:
        if not self.decay.value:
            return dict.fromkeys(("shape", "floor"), "the final fall has no length")
        if self.floor.fraction >= 1:
            return dict.fromkeys(("shape", "decay"), "the rate falls to 100% of the peak")
        return {}

    def falls(self, peak: float) -> bool:
        return self.floor.fraction < 1 and bool(self.decay.value)

    def args(self) -> dict[str, Any]:
        return {"floor": self.floor.fraction, "shape": self.shape}

    @classmethod
    def rate(cls, args: Mapping[str, Any], total: float) -> Curve:
        return warmup_and_decay(args, total, args["shape"], length_in_steps(args["decay"], total))

    @classmethod
    def shown(cls, args: Mapping[str, Any], length: Callable[[str], str]) -> list[str]:
        steps = args["steps"]
        start = f"the last {length('decay')}"
        lengths = args["warmup"], args["decay"]
        if steps is not None and all("steps" in each or "fraction" in each for each in lengths):
            warmup, decay = (length_in_steps(each, steps) for each in lengths)
            start = f"step {max(steps - decay, warmup):,}"
        return [f"constant to {start}", decay_text(args, args["shape"])]
