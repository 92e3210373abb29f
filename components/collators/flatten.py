"""`flatten`: rows as one list of samples."""

from typing import Any

from attrs import frozen

from xtrain.dsl.schema.data_components import LINKS, TENSOR_ROWS, TOKEN_SAMPLES, Link


@LINKS.register()
@frozen
class Flatten(Link):
    """`flatten`: rows of samples into one list of samples."""

    kind = "flatten"
    takes = TENSOR_ROWS
    gives = TOKEN_SAMPLES
    usual = True

    def does(self, run: Any) -> str:
        return "rows become one list of samples"
