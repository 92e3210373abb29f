"""Size-dependent values of a plan, looked up in the cache of counted data."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xtrain.planner.plan import Counted, Plan


def counted(plan: "Plan") -> "Counted | None":
    """The rows of its data; None where these are not in the cache. Loads what that takes only when it is called, which
    is for plans that wait."""
    from xtrain.runtime.data.loading.counting import counted_rows

    return counted_rows(plan)
