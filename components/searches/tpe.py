"""`method tpe { … }`: tree-structured Parzen estimators (Bergstra et al. 2011, NeurIPS 24) by Optuna."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from xtrain.components.searches.random import drawn
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.setting import at_least, execution_setting, seed_range
from xtrain.dsl.schema.sweep import METHODS, Method, Point
from xtrain.dsl.values import Dimension
from xtrain.lazy_attrs import frozen


@METHODS.register()
@frozen
class TpeSearch(Method):
    """`method tpe { … }`: later trials draw where earlier ones did well; Optuna suggests."""

    kind: str = named("tpe")
    seed: int = execution_setting("seed of the drawn values", default=0, check=seed_range)
    startup: int = execution_setting("number of first trials, drawn as in `random`", default=10, check=at_least(1))

    packages: ClassVar[tuple[str, ...]] = ("optuna",)

    def points(self, over: Mapping[str, Dimension], trials: int) -> Sequence[Point]:
        return [drawn(over, self.seed, number) for number in range(min(trials, self.startup))]

    @property
    def suggests(self) -> bool:
        return True

    def does(self) -> str:
        return f"{self.startup} points drawn with seed {self.seed}, then suggested from the results"
