"""Replica groups of a plan: copies of the model that may leave and come back while others train."""

from xtrain.dsl.schema.stacks import stack_of_node
from xtrain.planner.plan import Node, Plan


def groups_node(plan: Plan) -> Node | None:
    """The node of the stack whose copies of the model are replica groups; None under all others."""
    for node in plan.nodes:
        stack = stack_of_node(node.op)
        if stack is not None and stack.groups:
            return node
    return None
