"""The plan of `stack = torchft`: its nodes, mesh, memory and traffic, and what it refuses; torchft itself is not
needed."""

from pathlib import Path

import pytest

from xtrain.dsl.load import load_spec
from xtrain.plan.graph import groups_node, restarts_of
from xtrain.plan.plan import Plan
from xtrain.planner.compile import Compiled, compile_plan
from xtrain.planner.review.resumable import resumable
from xtrain.planner.rules import validate as stack_rules
from xtrain.planner.rules.validate import check_spec
from xtrain.runtime.base.process import plan_of_group

SPEC = """
experiment tiny {{ seed = 1, budget = 100 steps }}
model llama {{ dim = 64, layers = 2, heads = 8 }}
tokenizer bytes
dataset code {{ source = python_stdlib() }}
batch {{ sequence = 64, micro = 2, accumulate = 3 }}
optimizer adamw {{ lr = 1e-3, clip = 0.7 }}
launch {{ ranks_per_node = 4 }}
cluster other {{ flops = 1e9, memory = 1 GiB }}
parallel {{ stack = {stack} }}
{more}
"""


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The packages that are there."""
    there = {"torchft"}
    monkeypatch.setattr(stack_rules, "is_installed", lambda package: package in there)
    return there


def compiled(folder: Path, more: str = "", stack: str = "torchft") -> Compiled:
    (folder / "spec.xtrain").write_text(SPEC.format(more=more, stack=stack))
    return compile_plan(load_spec(folder / "spec.xtrain").require())


def plan_of(folder: Path, more: str = "", stack: str = "torchft") -> Plan:
    found = compiled(folder, more, stack)
    assert found.plan is not None, found.diagnostics.render()
    return found.plan


def test_each_group_has_a_mesh_of_its_own(tmp_path: Path):
    """What ranks share a process group with is their group; rows are dealt to all of them."""
    plan = plan_of(tmp_path, "parallel { torchft { replicas = 2, min = 2 } }")
    assert (plan.mesh.size("replicate"), plan.mesh.size("fsdp"), plan.mesh.world_size) == (2, 2, 4)
    own = plan_of_group(plan)
    assert (own.id, own.mesh.size("replicate"), own.mesh.size("fsdp"), own.mesh.world_size) == (plan.id, 1, 2, 2)
    for node in ("setup.bootstrap", "setup.mesh"):
        assert dict(plan.node(node).args["axes"]) == {axis.name: axis.size for axis in own.mesh.axes}
    assert plan.node("setup.loader").args["rows"] == 24
    stack = groups_node(plan)
    assert stack is not None and stack.args == {"replicas": 2, "min": 2, "heartbeat_seconds": 5.0}
    own = plan_of(tmp_path, "parallel { torchft { process_group = baby_gloo, timeout = 20 s } }")
    assert resumable(plan, own).kind != "incompatible"
    stack = groups_node(own)
    assert stack is not None and "baby_gloo" in stack.does
    assert (stack.args["process_group"], stack.args["timeout_seconds"]) == ("baby_gloo", 20.0)
    assert groups_node(plan_of(tmp_path, stack="ddp")) is None


@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_groups_lie_on_several_machines(tmp_path: Path, replicas: int):
    more = f"launch {{ nodes = 2 }}\nparallel {{ torchft {{ replicas = {replicas} }} }}"
    plan = plan_of(tmp_path, more)
    assert (plan.mesh.world_size, plan.launch["nodes"]) == (8, 2)
    assert {axis.name for axis in plan.mesh.axes if axis.crosses_nodes} == {"replicate"}
    assert not any(axis.crosses_nodes for axis in plan_of_group(plan).mesh.axes)


def test_groups_on_several_machines_are_started_again(tmp_path: Path):
    given = compiled(tmp_path, "launch { nodes = 2 }\nfault_tolerance { restarts = 3 }")
    assert given.plan is not None and "W401" not in given.diagnostics.render()
    assert restarts_of(given.plan) == ("fault_tolerance.restarts", 3)


def test_a_group_may_lie_on_several_machines(tmp_path: Path):
    plan = plan_of(tmp_path, "launch { nodes = 4, ranks_per_node = 2 }\nparallel { torchft { replicas = 2 } }")
    own = plan_of_group(plan).mesh
    assert (own.world_size, own.ranks_per_node) == (4, 2)
    assert {axis.name for axis in own.axes if axis.crosses_nodes} == {"fsdp"}


def test_the_plan_shows_quorum_sums_and_what_is_lost(tmp_path: Path):
    plan = plan_of(tmp_path)
    steps = [node.id for node in plan.nodes if node.kind == "step"]
    assert steps[:3] == ["step.torchft.quorum", "step.fetch", "step.agree"]
    assert steps.index("step.forward_backward") + 1 == steps.index("step.torchft.sum") == steps.index("step.clip") - 1
    assert "12 of the 24 rows of a step are never trained on" in plan.node("step.torchft.quorum").does
    assert "axes" not in plan.node("step.torchft.sum").args
    # What would wait for others between two steps, or write files for all ranks, is not to be asked for.
    assert {each.name for each in plan.timeline.commands} & {"pause", "resume", "profile", "memory"} == set()
    assert {"stop", "save"} <= {each.name for each in plan.timeline.commands}


def test_a_group_is_cut_as_so_many_ranks_alone(tmp_path: Path):
    """Replicas cut nothing; their gradients are summed once, those of a rank's pieces alone, and not by FSDP."""
    plan, alone = plan_of(tmp_path), plan_of(tmp_path, "launch { ranks_per_node = 2 }", stack="parallel")
    ours, theirs = plan.estimates.classes[0].memory, alone.estimates.classes[0].memory
    assert (ours.parameters, ours.gradients, ours.optimizer) == (theirs.parameters, theirs.gradients, theirs.optimizer)
    whole = sum(tensor.size for tensor in plan.parameters.tensors) * 4
    sums = {each.node: each for each in plan.estimates.classes[0].traffic if each.axis == "replicate"}
    assert sums["step.torchft.sum"].op == "all_reduce" and sums["step.torchft.sum"].bytes == whole // 2
    assert not [node for node in sums if node.startswith("setup.parallel")]
    single = plan_of(tmp_path, "parallel { torchft { replicas = 4 } }")
    assert not [node for node in single.nodes if "fsdp" in node.op]  # a rank by itself is not cut


@pytest.mark.parametrize(("more", "path", "says"), [
    ("parallel { pp 2 }", "parallel.pp.size", "spreads a replica group only over fsdp and tp, and pp is 2"),
    ("parallel { cp 2 }", "parallel.cp.size", "spreads a replica group only over fsdp and tp, and cp is 2"),
    ("parallel { fsdp auto { replicate = 2 } }", "parallel.fsdp.replicate", "are its replica groups"),
    ("parallel { torchft { min = 3 } }", "parallel.torchft.min", "would need 3 replica groups, and there are 2"),
    ("fault_tolerance { elastic = 2..4 }", "fault_tolerance.elastic", "continues with the remaining replica groups"),
    ("model qwen3_moe { dim = 64, layers = 2, heads = 8, experts = 4, expert_ffn = 32 }", "model.experts", "loads"),
    ("on nan(2) rollback", "on.0.actions.0", "rollback rolls back all replica groups"),
    ('every 10 steps export { to = "a/{step}" }', "every.0.actions.0", "the files of export over each other"),
])  # fmt: skip
def test_what_does_not_work_with_it_is_refused(tmp_path: Path, more: str, path: str, says: str):
    (tmp_path / "spec.xtrain").write_text(SPEC.format(more=more, stack="torchft"))
    errors = check_spec(load_spec(tmp_path / "spec.xtrain").require(), 4).errors
    (error,) = (each for each in errors if each.code == "X415")
    assert says in error.message and error.hint and error.span is not None, path


def test_the_extra_is_named_where_the_package_is_missing(tmp_path: Path, found: set[str]):
    found.clear()
    result = compiled(tmp_path)
    assert result.plan is None
    (error,) = result.diagnostics.errors
    assert error.code == "X715" and error.message.startswith("stack torchft needs the package torchft")
    assert error.hint == "install it with `pip install 'xtrain[torchft]'`, or use stack parallel"


def test_its_checkpoints_move_between_groups_and_stacks(tmp_path: Path):
    two, four = plan_of(tmp_path), plan_of(tmp_path, "parallel { torchft { replicas = 4 } }")
    other = plan_of(tmp_path, stack="parallel")
    assert {each.kind for each in resumable(two, four).reasons} <= {"safe", "resharded"}
    for one, next_one in ((two, other), (other, four)):
        kinds = {each.path: each.kind for each in resumable(one, next_one).reasons}
        assert set(kinds.values()) <= {"safe", "resharded"} and kinds["parallel.stack"] == "safe"
