"""`pack(sequential)`: next fit."""

from typing import Any

from xtrain.dsl.schema.data_components import PACKINGS, Packing
from xtrain.lazy_attrs import frozen


@PACKINGS.register()
@frozen
class Sequential(Packing):
    """`pack(sequential)`: documents in order, each in the open row if it has room."""

    kind = "sequential"
    in_order = True

    @classmethod
    def names_rows(cls, group: int) -> dict[str, Any]:
        return {}
