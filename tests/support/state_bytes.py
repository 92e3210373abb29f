"""Bytes of model state on a rank, from the pieces that a plan says it has."""

from math import prod

from xtrain.plan.groups import ParameterGroups
from xtrain.plan.mesh import base_of_plan, local_shapes
from xtrain.plan.parameters import beside_bytes
from xtrain.plan.plan import Plan
from xtrain.text.units import BYTES


def state_bytes(plan: Plan, rank: int) -> int:
    """Parameters, gradients, what the optimizer keeps, and averages where there are any; all but these in the format of
    the parameters. Of what is frozen, itself and its average, in the format that the plan says; or the bytes of
    codes."""
    averages = sum(BYTES[node.args["format"]] for node in plan.nodes if node.op == "setup.ema")
    width, groups = BYTES[plan.node("setup.build_model").args["params"]], ParameterGroups.of(plan)
    still = sum(BYTES[node.args["format"]] for node in plan.nodes if node.op == "setup.freeze")
    copies = 2 if averages else 1
    trained = {tensor.name for tensor in plan.parameters.tensors if tensor.trained}
    quantised = {tensor.name for tensor in plan.parameters.tensors if tensor.quantised}

    def of(name: str, shape: tuple[int, ...]) -> int:
        if name not in trained:
            return copies * (1 if name in quantised else still) * prod(shape)
        kept = sum(BYTES.get(each.format, width) * prod(each.shape(shape)) for each in groups.state(name))
        return (2 * width + averages) * prod(shape) + kept

    return sum(of(name, shape) for name, shape in local_shapes(plan, rank).items())


def scale_bytes(plan: Plan, rank: int) -> int:
    """What is beside the codes of matrices, whole on every rank that has a piece of them."""
    base, own = base_of_plan(plan), local_shapes(plan, rank)
    if base is None:
        return 0
    return sum(
        beside_bytes(base, each.shape) for each in plan.parameters.tensors if each.quantised and each.name in own
    )
