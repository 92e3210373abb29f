"""`to_tensor`: the first link of a chain."""

from typing import Any

from attrs import frozen

from xtrain.dsl.schema.data_components import LINKS, RAW_ROWS, TENSOR_ROWS, Link


@LINKS.register()
@frozen
class ToTensor(Link):
    """`to_tensor`: token arrays to tensors."""

    kind = "to_tensor"
    takes = RAW_ROWS
    gives = TENSOR_ROWS
    usual = True

    def does(self, run: Any) -> str:
        return "token arrays become int64 tensors"
