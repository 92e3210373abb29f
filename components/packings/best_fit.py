"""`pack(best_fit)`: the rows of `multipack`, balanced by cost."""

from xtrain.components.packings.multipack import Multipack
from xtrain.dsl.schema.data_components import PACKINGS
from xtrain.lazy_attrs import frozen


@PACKINGS.register()
@frozen
class BestFit(Multipack):
    """`pack(best_fit)`: the rows of `multipack`, assigned to data ranks so that attention costs are balanced."""

    kind = "best_fit"
    balances = True
    rows_of = "multipack"
