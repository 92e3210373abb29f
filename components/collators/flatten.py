"""`flatten`: rows as one list of samples."""

from typing import TYPE_CHECKING

from xtrain.contracts.data import PlannedLink
from xtrain.dsl.schema.data_components import LINKS, TENSOR_ROWS, TOKEN_SAMPLES
from xtrain.lazy_attrs import frozen

if TYPE_CHECKING:
    from xtrain.plan.resolved import Resolved


@LINKS.register()
@frozen
class Flatten(PlannedLink):
    """`flatten`: rows of samples into one list of samples."""

    kind = "flatten"
    takes = TENSOR_ROWS
    gives = TOKEN_SAMPLES
    usual = True

    def does(self, resolved: "Resolved") -> str:
        return "join rows into one list of samples"
