"""`pack(multipack)`: best-fit-decreasing in groups (Johnson 1973)."""

from typing import Any

from xtrain.dsl.schema.data_components import PACKINGS, Packing
from xtrain.lazy_attrs import frozen


@PACKINGS.register()
@frozen
class Multipack(Packing):
    """`pack(multipack)`: best-fit-decreasing: the documents of a group from longest to shortest, each in the fullest
    row with room.

    A larger group fills rows better (99.99 % at 100,000 documents of usual lengths); a smaller one keeps nearby
    documents together.
    """

    kind = "multipack"
    for_conversations = True

    @classmethod
    def names_rows(cls, group: int) -> dict[str, Any]:
        return {"group": group}
