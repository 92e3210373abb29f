"""Plans to trace: layouts of the table, and small experiments of their own."""

from math import prod
from pathlib import Path

from state_bytes import scale_bytes, state_bytes
from topologies import Topology
from trials import NoPlan, Trial

from xtrain.plan.mesh import local_shapes
from xtrain.plan.plan import Plan, Traced
from xtrain.planner.load import plan_from_spec
from xtrain.text.units import BYTES


def plan_of(
    folder: Path, topology: Topology, *sets: str, params: str = "", more: str = "", shallow: bool = True
) -> Plan:
    """The plan of a layout; data that are not there are no concern of a trace."""
    trial = topology.trial(params or topology.formats[0], shallow=shallow)
    path = Trial(model=trial.model, rows=trial.rows, clip=trial.clip, more=more).write(folder, alone=False)
    texts = (f"precision.params={trial.params}", *trial.settings, *topology.layout, *sets)
    compiled = plan_from_spec(path, texts)
    if compiled.plan is None:
        raise NoPlan("\n".join(error.message for error in compiled.diagnostics.errors))
    return compiled.plan


def calls(traced: Traced, node: str) -> dict[tuple[str, str], tuple[int, int]]:
    """(axis, op) → (count, bytes) of what a node makes a rank send."""
    return {(t.axis, t.op): (t.count, t.bytes) for t in traced.traffic if t.node == node}


def is_as_planned(plan: Plan, traced: Traced) -> None:
    """A rank holds the states that the plan foresees, and sends along axes of its mesh, for nodes of its graph."""
    memory = traced.memory
    planned = state_bytes(plan, traced.rank) + scale_bytes(plan, traced.rank)
    teacher = next((node.args for node in plan.nodes if node.op == "setup.teacher_model"), None)
    teaches = teacher is not None and teacher["owner"] == traced.pp
    assert memory.states > planned if teaches else memory.states == planned
    own, width = local_shapes(plan, traced.rank), BYTES[plan.node("setup.build_model").args["params"]]
    trained = (prod(own[tensor.name]) for tensor in plan.parameters.tensors if tensor.trained and tensor.name in own)
    assert memory.gradients == width * sum(trained)
    assert teaches or any(node.op == "setup.freeze" for node in plan.nodes) or memory.parameters == memory.gradients
    assert memory.activations > 0
    assert traced.pp == plan.mesh.coordinates(traced.rank)["pp"]
    names = {axis.name for axis in (*plan.mesh.axes, *plan.mesh.expert_axes) if axis.size > 1}
    nodes = {node.id for node in plan.nodes}
    for sent in traced.traffic:
        assert set(sent.axis.split(" · ")) <= names
        assert sent.node in nodes
        assert sent.count > 0 and sent.bytes > 0
