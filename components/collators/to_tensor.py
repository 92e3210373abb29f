"""`to_tensor`: the first link of a chain."""

from typing import TYPE_CHECKING

from xtrain.contracts.data import PlannedLink
from xtrain.dsl.schema.data_components import LINKS, RAW_ROWS, TENSOR_ROWS
from xtrain.lazy_attrs import frozen

if TYPE_CHECKING:
    from xtrain.plan.resolved import Resolved


@LINKS.register()
@frozen
class ToTensor(PlannedLink):
    """`to_tensor`: token arrays to tensors."""

    kind = "to_tensor"
    takes = RAW_ROWS
    gives = TENSOR_ROWS
    usual = True

    def does(self, resolved: "Resolved") -> str:
        return "convert token arrays to int64 tensors"
