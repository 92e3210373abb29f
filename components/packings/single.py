"""`pack(single)`: each document in a row of its own."""

from typing import Any

from xtrain.dsl.schema.data_components import PACKINGS, Packing
from xtrain.lazy_attrs import frozen


@PACKINGS.register()
@frozen
class Single(Packing):
    """`pack(single)`: documents in order, each in a row of its own."""

    kind = "single"
    in_order = True
    single = True

    @classmethod
    def names_rows(cls, group: int) -> dict[str, Any]:
        return {"packing": cls.kind}
