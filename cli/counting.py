"""Size-dependent values of a plan, looked up in the cache of counted data."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xtrain.planner.plan import Counted, Plan


def counted(plan: "Plan") -> "Counted | None":
    """Return the counted rows of the plan's data; None if they are not in the cache. Imports its modules on call,
    because only plans that wait for data need them."""
    from xtrain.runtime.data.loading.counting import counted_rows

    return counted_rows(plan)
