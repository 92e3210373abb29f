"""`launcher`: where `xtrain launch` has the machines of a run from."""

from collections.abc import Iterator
from typing import Any, ClassVar, Final

from attrs import frozen

from xtrain.dsl.schema.component import Component, Registry

LAUNCHERS: Final = Registry["Launcher"]("launcher", "launchers")


@LAUNCHERS.base
@frozen
class Launcher(Component):
    """`launcher NAME { … }`: where `xtrain launch` has the machines of a run from; without this block `--on` says it.

    `_run.py` beside a launcher defines an object `LAUNCHER`, a `JobLauncher` (`runtime/launch/jobs.py`), which writes
    the files of a job, submits them, and asks what has become of it.
    """

    alone: ClassVar[bool] = False
    """Whether it has no more than one machine."""
    obeys_restarts: ClassVar[bool] = False
    """Whether it starts all machines of a run again after a failure, as often as `fault_tolerance.restarts` says."""

    def says(self) -> str:
        """What the page of the plan says of it, behind its name."""
        return ""

    def mistakes(self, spec: Any) -> Iterator[tuple[str, str, str]]:
        """(setting, what is wrong with it, what to write instead). spec: the whole one."""
        return iter(())

    def own_restarts(self) -> tuple[str, int] | None:
        """The setting of its own that says how often it does that, and its value; None where there is none."""
        return None

    def few_gpus(self, spec: Any) -> Iterator[tuple[str, str, str]]:
        """A mistake where `gpus` of a node are fewer than its ranks; none at all may be asked for in another way."""
        gpus, ranks = getattr(self, "gpus", None), spec.launch.ranks_per_node
        on_cpus = "cpu" in (spec.launch.device, spec.cluster.device)
        if isinstance(gpus, int) and isinstance(ranks, int) and 0 < gpus < ranks and not on_cpus:
            what = f"a node has {gpus} of them, and each of its {ranks} ranks needs one"
            yield "gpus", what, f"use gpus {ranks}, or launch.ranks_per_node {gpus}"

    def idle(self) -> Iterator[tuple[str, str]]:
        """Settings that another one makes idle, and why."""
        return iter(())
