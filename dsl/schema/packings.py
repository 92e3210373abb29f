"""`pack(NAME)`: what is asked of the ways to choose which documents share a row."""

from typing import Any, ClassVar, Final

from xtrain.dsl.schema.component import Component, Registry

PACKINGS: Final = Registry["Packing"]("packing", "packings", call="{}", order=lambda packing: packing.balances)


@PACKINGS.base
class Packing(Component):
    """`pack(NAME)`: which documents share a row.

    The module `…_run` beside a packing has a function `fill`, see `runtime/data/packing/pack.py`.
    """

    in_order: ClassVar[bool] = False
    """Whether documents keep their order; else they are packed together in groups of consecutive ones."""
    for_conversations: ClassVar[bool] = False
    """Whether `auto` means it for conversations and answers."""
    single: ClassVar[bool] = False
    """Whether each document has a row of its own."""
    balances: ClassVar[bool] = False
    """Whether the rows of a step are dealt to data ranks so that attention costs them alike."""
    rows_of: ClassVar[str] = ""
    """Another packing that makes the same rows."""

    @classmethod
    def rows(cls) -> str:
        """The packing that its rows are those of."""
        return cls.rows_of or cls.kind

    @classmethod
    def names_rows(cls, group: int) -> dict[str, Any]:
        """What tells its rows from those of other packings, as JSON. group: documents that are packed together."""
        return {"packing": cls.rows(), "group": group}


def packing_of(method: str | None) -> type[Packing]:
    """The packing of a name in a plan; where there is none, that of a spec that names none."""
    return PACKINGS.default if method is None else PACKINGS[method]
