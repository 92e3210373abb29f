"""The nodes of a server's plan on a rank: those of the set-up run, those of requests become what carries them out."""

import time
from collections.abc import Callable, Collection
from typing import Any

from xtrain.planner.plan import Node, Plan
from xtrain.runtime.execution.node_order import topological
from xtrain.runtime.ops import load_ops, op_of
from xtrain.runtime.serving.passes import Handle
from xtrain.runtime.serving.ranks import ServingRanks
from xtrain.runtime.state import Resources


def set_up(
    plan: Plan,
    resources: Resources,
    done: Callable[[Node, float], None] = lambda node, seconds: None,
    without: Collection[str] = (),
) -> ServingRanks:
    """Run the set-up in the order of the plan; what the requests need is then among the resources.

    done: is called behind each node, with the seconds that it took. without: nodes whose results are there already.
    """
    load_ops()
    for node in topological(plan):
        if node.kind == "setup" and node.id not in without:
            began = time.perf_counter()
            operation = op_of(node)
            result = operation.bind(node, {**resources, "node_id": node.id})()
            if operation.gives:
                resources[operation.gives] = result
            done(node, time.perf_counter() - began)
    return ServingRanks(
        rank=resources["rank"], handles=_handles(plan, resources), slots=resources["slots"], beat=resources["beat"]
    )


def _handles(plan: Plan, resources: Resources) -> dict[str, Handle]:
    return {node.op.removeprefix("request."): _handle(node, resources) for node in plan.of_kind("request")}


def _handle(node: Node, resources: dict[str, Any]) -> Handle:
    return op_of(node).bind(node, {**resources, "node_id": node.id})()


def shut_down(plan: Plan, resources: Resources) -> None:
    """Run the nodes of the end, in their order."""
    for node in topological(plan):
        if node.kind == "shutdown":
            op_of(node).bind(node, {**resources, "node_id": node.id})()
    watch = resources.get("watch")
    if watch is not None:
        watch.close()
