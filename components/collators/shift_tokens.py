"""`shift_tokens`: inputs and next-token labels."""

from typing import TYPE_CHECKING

from xtrain.contracts.data import PlannedLink
from xtrain.dsl.schema.data_components import LABELLED_SAMPLES, LINKS, TOKEN_SAMPLES
from xtrain.lazy_attrs import frozen

if TYPE_CHECKING:
    from xtrain.plan.resolved import Resolved


@LINKS.register()
@frozen
class ShiftTokens(PlannedLink):
    """`shift_tokens`: labels are the inputs shifted by one, inside each document."""

    kind = "shift_tokens"
    takes = TOKEN_SAMPLES
    gives = LABELLED_SAMPLES
    usual = True

    def does(self, resolved: "Resolved") -> str:
        return "set each label to the next token of the same document"
