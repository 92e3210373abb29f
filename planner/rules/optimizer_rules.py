"""Settings of optimizers and losses that do not fit the rest of a spec; each says its own."""

from xtrain.dsl.spec import Spec
from xtrain.planner.architecture import Architecture
from xtrain.planner.findings import Findings
from xtrain.planner.mesh.layout import Layout
from xtrain.planner.model.groups import written_optimizers


def check_optimizer(spec: Spec, arch: Architecture, layout: Layout, found: Findings) -> None:
    """Report what an optimizer cannot be combined with."""
    for group, chosen in written_optimizers(spec).items():
        for each in chosen.conflicts(spec, arch, layout):
            path = f"{group}optimizer.{each.setting}"
            rule = f"{group}settings" if group else path
            found.fail(rule, "X437", path, each.message, each.hint)


def check_loss(spec: Spec, found: Findings) -> None:
    """Report what settings of the loss cannot be combined."""
    for each in spec.loss.conflicts():
        path = f"loss.{each.setting}"
        found.fail(path, "X439", path, each.message, each.hint)
