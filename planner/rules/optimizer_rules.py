"""Settings of the optimizer that do not fit the rest of a spec; each optimizer says its own."""

from ...dsl.spec import Spec
from ..architecture import Architecture
from ..findings import Findings
from ..mesh.layout import Layout


def check_optimizer(spec: Spec, arch: Architecture, layout: Layout, found: Findings) -> None:
    """Report what the optimizer cannot be combined with."""
    for each in spec.optimizer.misfits(spec, arch, layout):
        path = f"optimizer.{each.setting}"
        found.fail(path, "X437", path, each.message, each.hint)
