"""The nodes of hooks: functions of the user's own that a run calls beside other nodes."""

from typing import Any

from xtrain.dsl.schema.actions import action_of
from xtrain.dsl.schema.hooks import Hook
from xtrain.dsl.spec import Spec
from xtrain.dsl.user_parts.places import AROUND, IN_STEP, NOTHING, PLACES
from xtrain.planner.graph.builder import Builder


def hook_text(hook: Hook) -> str:
    """What the node of a hook does, in words."""
    place, changes = hook.declared["place"], hook.declared["changes"]
    purpose = hook.purpose.removesuffix(".")
    does = f"{hook.function} of {hook.module}, {PLACES[place]}{f': {purpose}' if purpose else ''}"
    return does if changes == NOTHING else f"{does}; changes {changes}"


def add_hooks(graph: Builder, spec: Spec, after: str) -> None:
    """Add the hooks that have no place within a step; those around nodes say around which."""
    for hook in spec.hooks.values():
        place = hook.declared["place"]
        if place in IN_STEP:
            continue
        args: dict[str, Any] = hook.args()
        if place in AROUND:
            hooked = {node.id: action.hooked for node in graph.nodes if (action := action_of(node.op)) is not None}
            args["nodes"] = [id for id, word in hooked.items() if word == place.partition("_")[2]]
        graph.add("event", "event.hook", hook_text(hook), id=f"hook.{hook.name}", args=args, after=(after,))
