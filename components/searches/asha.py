"""`method asha { … }`: asynchronous successive halving (Li et al. 2020, MLSys 2, arXiv 1810.05934)."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from xtrain.components.searches.random import drawn
from xtrain.components.searches.tpe import TpeSearch
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.setting import at_least, execution_setting, positive, seed_range
from xtrain.dsl.schema.sweep import METHODS, Halving, Method, Point
from xtrain.dsl.values import Dimension, Quantity
from xtrain.lazy_attrs import frozen


@METHODS.register()
@frozen
class AshaSearch(Method):
    """`method asha { … }`: trials are compared at rungs, each with `factor` times the budget of the previous one. A
    trial continues only if it is among the best 1 / `factor` of the trials that reached the rung so far."""

    kind: str = named("asha")
    first: Quantity = execution_setting(
        "budget of a trial up to the first rung", units=("steps", "tokens"), check=positive, example="100k tokens"
    )
    factor: int = execution_setting(
        "one trial in this many continues, with this many times the budget", default=3, check=at_least(2)
    )
    suggest: Literal["tpe", "random"] = execution_setting(
        "how values are chosen. tpe: by Optuna from the results; random: drawn", default="tpe"
    )
    seed: int = execution_setting("seed of the drawn values", default=0, check=seed_range)
    startup: int = execution_setting(
        "with tpe: number of first trials, drawn as in `random`", default=10, check=at_least(1)
    )

    packages: ClassVar[tuple[str, ...]] = ("optuna",)

    @classmethod
    def run_module(cls) -> str:
        return TpeSearch.run_module()

    def points(self, over: Mapping[str, Dimension], trials: int) -> Sequence[Point]:
        known = min(trials, self.startup) if self.suggests else trials
        return [drawn(over, self.seed, number) for number in range(known)]

    @property
    def suggests(self) -> bool:
        return self.suggest == "tpe"

    @property
    def halving(self) -> Halving:
        return Halving(self.first, self.factor)

    def needed(self) -> tuple[str, ...]:
        return self.packages if self.suggests else ()

    def does(self) -> str:
        chosen = f"{self.startup} points drawn with seed {self.seed}, then suggested" if self.suggests else "drawn"
        return (
            f"{chosen}; one in {self.factor} continues at each rung, the first at {self.first.value:,} "
            f"{self.first.unit}"
        )
