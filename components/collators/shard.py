"""`shard`: a context-parallel rank's part of a row."""

from typing import TYPE_CHECKING, Any

from xtrain.contracts.data import PlannedLink
from xtrain.dsl.schema.data_components import LINKS, LOCAL_MICROBATCH, MICROBATCH
from xtrain.lazy_attrs import frozen

if TYPE_CHECKING:
    from xtrain.plan.resolved import Resolved


@LINKS.register()
@frozen
class Shard(PlannedLink):
    """`shard`: the part of each row that a context-parallel rank holds; added automatically if cp is above 1."""

    kind = "shard"
    takes = MICROBATCH
    gives = LOCAL_MICROBATCH
    by_layout = True

    def args(self, resolved: "Resolved") -> dict[str, Any]:
        return {"ring": resolved.size("ring"), "ulysses": resolved.size("ulysses")}

    def axes(self, resolved: "Resolved") -> tuple[str, ...]:
        return resolved.wide("ring", "ulysses")

    def does(self, resolved: "Resolved") -> str:
        sequence = resolved.batch.sequence
        return f"keep this rank's {sequence // resolved.context:,} of {sequence:,} positions of every row"
