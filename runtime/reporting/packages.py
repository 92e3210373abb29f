"""Packages that only some runs need, looked for before anything is begun."""

from importlib.util import find_spec

from ...dsl.schema.log import tracker_of
from ...planner.plan import Plan
from ..errors import EnvironmentFault
from ..ops import code_of


def check_packages(plan: Plan) -> None:
    """Raise EnvironmentFault where the first rank cannot load a tracker: a package is missing, which is not imported
    here, or the tracker's own module fails."""
    for node in plan.nodes:
        tracker = tracker_of(node.op)
        if tracker is None:
            continue
        if tracker.package and not _is_installed(tracker.package):
            remedy = f"install it with `pip install '{tracker.install or tracker.package}'`, or remove it from `log`"
            message = f"log needs the package {tracker.package}, which is not installed here; {remedy}"
            raise EnvironmentFault("X715", message)
        code_of(tracker, tracker.run_module())


def _is_installed(package: str) -> bool:
    found = find_spec(package)
    # A mere folder of that name, as W&B leaves one where it runs, would pass for a package without content.
    return found is not None and found.origin is not None
