"""`method random { … }`: random points (Bergstra and Bengio 2012, JMLR 13)."""

from collections.abc import Mapping, Sequence
from random import Random

from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.setting import execution_setting, seed_range
from xtrain.dsl.schema.sweep import METHODS, Method, Point
from xtrain.dsl.values import Dimension
from xtrain.lazy_attrs import frozen


def drawn(over: Mapping[str, Dimension], seed: int, number: int) -> Point:
    """Return the point of a trial. It depends on neither the number of trials nor the other dimensions."""
    return {name: dimension.at(Random(f"{seed}/{number}/{name}").random()) for name, dimension in over.items()}


@METHODS.register()
@frozen
class RandomSearch(Method):
    """`method random { … }`: each trial draws its values independently."""

    kind: str = named("random")
    seed: int = execution_setting("seed of the drawn values", default=0, check=seed_range)

    def points(self, over: Mapping[str, Dimension], trials: int) -> Sequence[Point]:
        return [drawn(over, self.seed, number) for number in range(trials)]

    def does(self) -> str:
        return f"values drawn with seed {self.seed}"
