"""Packages that only some runs need, looked for before anything is begun; none is imported here."""

from importlib.util import find_spec

from ...dsl.schema.log import tracker_of
from ...planner.plan import Plan
from ..errors import EnvironmentFault


def check_packages(plan: Plan) -> None:
    """Raise EnvironmentFault where a package is missing that the first rank needs for its records."""
    for node in plan.nodes:
        tracker = tracker_of(node.op)
        package = tracker.package if tracker is not None else ""
        if tracker is not None and package and not _is_installed(package):
            remedy = f"install it with `pip install '{tracker.install or package}'`, or remove it from `log`"
            raise EnvironmentFault("X715", f"log needs the package {package}, which is not installed here; {remedy}")


def _is_installed(package: str) -> bool:
    found = find_spec(package)
    # A mere folder of that name, as W&B leaves one where it runs, would pass for a package without content.
    return found is not None and found.origin is not None
