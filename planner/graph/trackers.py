"""Trackers, which take the records of a run beside its own files: their nodes, and what they say of their settings."""

from xtrain.dsl.schema.component import UserComponent
from xtrain.dsl.schema.log import OP
from xtrain.dsl.spec import Spec
from xtrain.planner.findings import Findings
from xtrain.planner.graph.builder import Builder


def add_trackers(graph: Builder, spec: Spec, last: str) -> str:
    """Add a node for each that is on; the last node of the setup."""
    for tracker in spec.log.trackers():
        op = f"{OP}user" if isinstance(tracker, UserComponent) else f"{OP}{tracker.kind}"
        does = f"the first rank {tracker.does()}, beside training"
        last = graph.add("setup", op, does, id=f"{OP}{tracker.kind}", args=tracker.args(), after=(last,))
    return last


def check_trackers(spec: Spec, found: Findings) -> None:
    """What trackers can tell of their settings before a run."""
    for tracker in spec.log.written():
        tracker.check(found)
