"""Rules of `launcher`."""

from xtrain.dsl.spec import Spec
from xtrain.planner.findings import Findings


def check_launcher(spec: Spec, found: Findings) -> None:
    """Report settings of the launcher that do not go together; each launcher knows its own."""
    if spec.launcher is None:
        return
    for name, what, hint in spec.launcher.mistakes(spec):
        message = f"launcher.{name}: {what}"
        found.fail(f"launcher.{name}", "X460", f"launcher.{name}", message, hint)
