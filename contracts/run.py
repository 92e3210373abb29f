"""Contracts of components around training: checks of trackers and launchers."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from attrs import frozen

from xtrain.dsl.schema.cluster import Launcher
from xtrain.dsl.schema.run import Tracker

if TYPE_CHECKING:
    from xtrain.dsl.spec import Spec
    from xtrain.plan.findings import Findings


class PlannedTracker(Tracker):
    """Base class of all trackers."""

    def check(self, found: "Findings") -> None:
        """Check the settings of the tracker and report to `found`, as rules `log.NAME.SETTING`."""


@frozen
class PlannedLauncher(Launcher):
    """Base class of all launchers."""

    def mistakes(self, spec: "Spec") -> Iterator[tuple[str, str, str]]:
        """Yield (setting, what is wrong, what to write instead) for settings that do not fit a spec."""
        return iter(())

    def few_gpus(self, spec: "Spec") -> Iterator[tuple[str, str, str]]:
        """Yield a mistake, as `mistakes` does, if a node has fewer `gpus` than ranks. 0 is accepted: the cluster may
        assign GPUs in another way."""
        gpus, ranks = getattr(self, "gpus", None), spec.launch.ranks_per_node
        on_cpus = "cpu" in (spec.launch.device, spec.cluster.device)
        if isinstance(gpus, int) and isinstance(ranks, int) and 0 < gpus < ranks and not on_cpus:
            what = f"a node has {gpus} GPUs, and each of its {ranks} ranks needs one"
            yield "gpus", what, f"use gpus {ranks}, or launch.ranks_per_node {gpus}"
