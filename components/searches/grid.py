"""`method grid`."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import ClassVar

from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.sweep import METHODS, Method, Point
from xtrain.dsl.values import Dimension
from xtrain.lazy_attrs import frozen


@METHODS.register()
@frozen
class GridSearch(Method):
    """`method grid`: every combination of the values, the last dimension changing fastest."""

    kind: str = named("grid")

    everything: ClassVar[bool] = True

    def points(self, over: Mapping[str, Dimension], trials: int) -> Sequence[Point]:
        values = [dimension.grid() or () for dimension in over.values()]
        return [dict(zip(over, each, strict=True)) for each in product(*values)]

    def does(self) -> str:
        return "every combination of the values"
