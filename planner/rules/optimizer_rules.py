"""Settings of the optimizer that do not fit the rest of a spec; each optimizer says its own."""

from ...dsl.spec import Spec
from ..architecture import Architecture
from ..findings import Findings
from ..mesh.layout import Layout
from ..model.groups import optimizers_of


def check_optimizer(spec: Spec, arch: Architecture, layout: Layout, found: Findings) -> None:
    """Report what an optimizer cannot be combined with."""
    for group, chosen in optimizers_of(spec).items():
        for each in chosen.misfits(spec, arch, layout):
            path = f"group.{group}.optimizer.{each.setting}" if group else f"optimizer.{each.setting}"
            rule = f"group.{group}.settings" if group else path
            found.fail(rule, "X437", path, each.message, each.hint)
