"""Contracts of actions (nodes in a plan, memory, rules), trackers and launchers."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from xtrain.dsl.schema.actions import Action
from xtrain.dsl.schema.cluster import Launcher
from xtrain.dsl.schema.run import Tracker
from xtrain.lazy_attrs import frozen

if TYPE_CHECKING:
    from xtrain.dsl.spec import Spec
    from xtrain.plan.architecture import Architecture
    from xtrain.plan.findings import Findings
    from xtrain.plan.graph import ActionNode, ActionPlace, StepNode
    from xtrain.plan.resolved import Resolved


class PlannedAction(Action):
    """Base class of all actions. An action overrides the methods whose defaults do not fit."""

    def node(self, resolved: "Resolved", place: "ActionPlace") -> "ActionNode":
        """Return the node of the action at a place. Only called for actions that have a node."""
        raise NotImplementedError

    @classmethod
    def in_step(cls, ticks: Sequence[Action], resolved: "Resolved") -> Iterator["StepNode"]:
        """Yield nodes that every step needs for this kind of action. ticks: all actions of this kind in ticks, at least
        one."""
        yield from ()

    def allocates(self, resolved: "Resolved", states: int) -> int:
        """Return the bytes that the action holds on a rank after the optimizer step. states: bytes of the rank's
        trained parameters."""
        return 0

    @classmethod
    def commands(
        cls, declared: Sequence[Action], spec: "Spec", training: tuple[str, ...]
    ) -> Iterator[tuple[str, Action, str]]:
        """Yield (command of `xtrain control`, the action that the command runs, the unit of its number or "").
        declared: all actions of the spec, in order. training: names of the training datasets."""
        yield from ()

    def faults(self, event: str, arch: "Architecture", spec: "Spec") -> dict[str, tuple[str, str, str]]:
        """Return reasons why a model does not support the action: setting, or "" for the action itself → (code,
        message, hint). event: "" for a tick."""
        return {}

    def idle(self, spec: "Spec", ranks: int) -> dict[str, tuple[str, str]]:
        """Return the settings that have no effect: setting → (reason, what to do instead)."""
        return {}

    def template(self, spec: "Spec") -> str | None:
        """Return the chat template that the action writes with: a name as datasets give it, or `auto` for the
        tokenizer's template. None without a chat template."""
        return None

    def length(self, spec: "Spec") -> int:
        """Return the number of following steps that the action covers. Two actions of a kind cannot overlap."""
        return 0


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
        on_cpus = "cpu" in (spec.launch.device, spec.cluster.device_kind())
        if isinstance(gpus, int) and isinstance(ranks, int) and 0 < gpus < ranks and not on_cpus:
            what = f"a node has {gpus} GPUs, and each of its {ranks} ranks needs one"
            yield "gpus", what, f"use gpus {ranks}, or launch.ranks_per_node {gpus}"
