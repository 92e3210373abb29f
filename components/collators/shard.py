"""`shard`: a context-parallel rank's part of a row."""

from typing import TYPE_CHECKING, Any

from attrs import frozen

from xtrain.contracts.data import PlannedLink
from xtrain.dsl.schema.data_components import LINKS, LOCAL_MICROBATCH, MICROBATCH

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

    def args(self, run: "Resolved") -> dict[str, Any]:
        return {"ring": run.size("ring"), "ulysses": run.size("ulysses")}

    def axes(self, run: "Resolved") -> tuple[str, ...]:
        return run.wide("ring", "ulysses")

    def does(self, run: "Resolved") -> str:
        sequence = run.batch.sequence
        return f"keep this rank's {sequence // run.context:,} of {sequence:,} positions of every row"
