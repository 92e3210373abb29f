"""`shift_tokens`: inputs and next-token labels."""

from typing import Any

from attrs import frozen

from xtrain.dsl.schema.data_components import LABELLED_SAMPLES, LINKS, TOKEN_SAMPLES, Link


@LINKS.register()
@frozen
class ShiftTokens(Link):
    """`shift_tokens`: labels are the inputs shifted by one, inside each document."""

    kind = "shift_tokens"
    takes = TOKEN_SAMPLES
    gives = LABELLED_SAMPLES
    usual = True

    def does(self, run: Any) -> str:
        return "each label is the next token of the same document"
