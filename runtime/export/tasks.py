"""The adapter of one of several tasks, as if a run had trained it alone: what is exported, and merged."""

from collections.abc import Mapping
from typing import Final

from attrs import evolve

from xtrain.dsl.schema.adapters import TaskAdapters
from xtrain.planner.blocks.adapted import alone_name
from xtrain.planner.model.tasks import alone, unfit_task
from xtrain.planner.plan import Node, Plan
from xtrain.runtime.errors import ExportFailed

READ: Final = "setup.read_adapter"


def plan_of(plan: Plan, task: str | None) -> Plan:
    """The plan of a run with the adapter of a task alone; without tasks the plan itself. Raises ExportFailed where it
    has no such task, or none is named."""
    if (problem := unfit_task(plan.architecture, task)) is not None:
        raise ExportFailed("; ".join(problem), "X525")
    if task is None:
        return plan
    kept = (tensor for tensor in plan.parameters.tensors if tensor.task in ("", task))
    tensors = tuple(evolve(tensor, name=alone_name(tensor), task="") for tensor in kept)
    return evolve(
        plan,
        architecture=alone(plan.architecture, task),
        parameters=evolve(plan.parameters, tensors=tensors),
        nodes=tuple(_as_alone(node) for node in plan.nodes if node.op != READ or node.args["task"] == task),
    )


def _as_alone(node: Node) -> Node:
    """What reads the adapter of a task as a run of that task alone has it; another node as it is."""
    return evolve(node, args={name: node.args[name] for name in ("folder", "digest")}) if node.op == READ else node


def stored_names(plan: Plan, task: str | None) -> Mapping[str, str]:
    """What checkpoints of a plan with tasks call the parameters of `plan_of`, where they do otherwise."""
    if task is None or not isinstance(plan.architecture.adapter, TaskAdapters):
        return {}
    return {alone_name(tensor): tensor.name for tensor in plan.parameters.tensors if tensor.task == task}
