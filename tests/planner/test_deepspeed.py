"""The plan of `stack = deepspeed`: its nodes, configuration, memory and traffic, and what it refuses; DeepSpeed itself
is not needed."""

import json
from pathlib import Path

import pytest

from xtrain.dsl.load import load_spec
from xtrain.plan.plan import Plan
from xtrain.planner.compile import Compiled, compile_plan
from xtrain.planner.review.resumable import resumable
from xtrain.planner.rules import validate as stack_rules
from xtrain.planner.rules.validate import check_spec

SPEC = """
experiment tiny {{ seed = 1, budget = 100 steps }}
model llama {{ dim = 64, layers = 2, heads = 8 }}
tokenizer bytes
dataset code {{ source = python_stdlib() }}
batch {{ sequence = 64, micro = 2, accumulate = 3 }}
optimizer adamw {{ lr = 1e-3, clip = 0.7 }}
launch {{ ranks_per_node = 4 }}
cluster other {{ flops = 1e9, memory = 1 GiB }}
parallel {{ stack = {stack}, deepspeed {{ stage = {stage} }} }}
{more}
"""
EXPERTS = "model qwen3_moe { dim = 64, layers = 2, heads = 8, experts = 4, expert_ffn = 32 }"


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The packages that are there."""
    there = {"deepspeed"}
    monkeypatch.setattr(stack_rules, "is_installed", lambda package: package in there)
    return there


def compiled(folder: Path, stage: int, more: str = "", stack: str = "deepspeed") -> Compiled:
    (folder / "spec.xtrain").write_text(SPEC.format(stage=stage, more=more, stack=stack))
    return compile_plan(load_spec(folder / "spec.xtrain").require())


def plan_of(folder: Path, stage: int, stack: str = "deepspeed") -> Plan:
    found = compiled(folder, stage, stack=stack)
    assert found.plan is not None, found.diagnostics.render()
    return found.plan


@pytest.mark.parametrize("stage", range(4))
def test_the_configuration_follows_from_the_spec(tmp_path: Path, stage: int):
    """Batches agree with one another, and neither clipping nor averaging is left to the engine."""
    plan = plan_of(tmp_path, stage)
    config = plan.node("setup.parallel.deepspeed").args["config"]
    batch = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert [config[name] for name in batch] == [24, 2, 3]
    assert config["gradient_clipping"] == 0.0 and config["zero_optimization"]["stage"] == stage
    assert config.get("gradient_allreduce_op") == ("sum" if stage < 3 else None)
    assert "auto" not in json.dumps(config)
    assert plan.node("step.clip").args == {"max_norm": 0.7}
    assert plan.mesh.size("replicate") == 4
    ids = [node.id for node in plan.nodes]
    assert ids.index("setup.optimizer") < ids.index("setup.parallel.deepspeed") < ids.index("setup.stack_optimizer")


def test_each_stage_leaves_a_rank_less(tmp_path: Path):
    """Parameters P, gradients and moments of four ranks; from stage 1 on a rank updates a copy of its piece of P."""
    plans = [plan_of(tmp_path, stage) for stage in range(4)]
    whole = sum(tensor.size for tensor in plans[0].parameters.tensors) * 4
    piece = whole // 4
    memory = [plan.estimates.classes[0].memory for plan in plans]
    assert [each.parameters for each in memory] == [whole, whole + piece, whole + piece, 2 * piece]
    assert [each.gradients for each in memory] == [whole, whole, piece, piece]
    assert [each.optimizer for each in memory] == [2 * whole, 2 * piece, 2 * piece, 2 * piece]
    assert memory[3].unsharded > 0 == memory[2].unsharded
    assert memory[0].total_bytes > memory[1].total_bytes > memory[3].total_bytes


@pytest.mark.parametrize(("stage", "calls"), [
    (0, {"all_reduce": 1}),
    (1, {"all_reduce": 1, "all_gather": 1}),
    (2, {"all_reduce": 3, "all_gather": 1}),
    (3, {"reduce_scatter": 3, "all_gather": 6}),
])  # fmt: skip
def test_what_a_step_sends(tmp_path: Path, stage: int, calls: dict[str, int]):
    """How often all parameters, or their gradients, pass in a step of three microbatches."""
    plan = plan_of(tmp_path, stage)
    whole = sum(tensor.size for tensor in plan.parameters.tensors) * 4
    traffic = {each.op: each.bytes for each in plan.estimates.classes[0].traffic if "deepspeed" in each.node}
    assert traffic == {op: times * whole for op, times in calls.items()}


@pytest.mark.parametrize(("stage", "more", "says"), [
    (0, "parallel { tp 2 }", "spreads a model only over data ranks, and tp is 2"),
    (0, "parallel { pp 2 }", "spreads a model only over data ranks, and pp is 2"),
    (0, "precision { params = fp64 }", "keeps weights and sums in fp32, not in fp64"),
    (0, "precision { compute = bf16 }", "stage 0 of stack deepspeed has an optimizer of its own for bf16"),
    (1, "precision { compute = bf16 }", "stage 1 of stack deepspeed has an optimizer of its own for bf16"),
    (2, "precision { compute = fp64 }", "computes in fp32 or in bf16, not in fp64"),
    (2, "precision { compute = fp8 { recipe = rowwise } }", "computes in fp32 or in bf16, not in fp8"),
    (2, "precision { compute = bf16 }\nema { decay = 0.9 }", "ema reads parameters, which stack deepspeed has in bf16"),
    (0, "activation full { tile_mlp = 2 }", "with tile_mlp it arrives in parts"),
    (0, "optimizer schedule_free { lr = 1e-3 }", "moves weights before the forward"),
    (2, f"precision {{ compute = bf16 }}\n{EXPERTS}", "mixtures of experts only in fp32"),
    (1, "optimizer muon { lr = 1e-3 }", "muon needs more of a parameter than the element that it updates"),
    (1, "optimizer { clip_value = 1.0 }", "has the norm of all gradients, but not each element"),
    (1, 'group "norm*" { optimizer sgd { lr = 1.0 } }', "has one optimizer for all parameters"),
    (2, "every 10 steps norms", "norms reads gradients of parameters"),
    (3, "ema { decay = 0.9 }", "ema reads parameters"),
    (3, "adapter lora { rank = 2 }", "an adapter reads parameters"),
    (3, EXPERTS, "a router returns more"),
    (3, "compile { mode = default }", "compile reads parameters"),
])  # fmt: skip
def test_what_does_not_work_with_it_is_refused(tmp_path: Path, stage: int, more: str, says: str):
    (tmp_path / "spec.xtrain").write_text(SPEC.format(stage=stage, more=more, stack="deepspeed"))
    errors = check_spec(load_spec(tmp_path / "spec.xtrain").require(), 4).errors
    (error,) = (each for each in errors if each.code == "X415")
    assert says in error.message and "stack parallel" in (error.hint or "") and error.span is not None


def test_what_a_lower_stage_allows(tmp_path: Path):
    for stage, more, op in (
        (0, "optimizer muon { lr = 1e-3 }", "setup.optimizer"),
        (0, "every 10 steps norms", "tick.norms"),
        (2, "ema { decay = 0.9 }", "setup.ema"),
    ):
        assert op in {node.op for node in compiled(tmp_path, stage, more).plan.nodes}


@pytest.mark.parametrize("stage", [2, 3])
def test_in_bf16_a_rank_updates_its_piece_in_fp32(tmp_path: Path, stage: int):
    """What it computes with takes half as much, and so does what is gathered of it."""
    plan, in_fp32 = compiled(tmp_path, stage, "precision { compute = bf16 }").plan, plan_of(tmp_path, stage)
    assert plan is not None
    config = plan.node("setup.parallel.deepspeed").args["config"]
    assert config["bf16"] == {"enabled": True} and not config["fp16"]["enabled"]
    assert config["data_types"] == {"grad_accum_dtype": "fp32"} and config["communication_data_type"] == "fp32"
    piece = sum(tensor.size for tensor in plan.parameters.tensors)  # of four ranks, in fp32
    memory, before = (each.estimates.classes[0].memory for each in (plan, in_fp32))
    assert memory.parameters == piece + (4 * piece // 2 if stage == 2 else piece // 2)
    assert (memory.gradients, memory.optimizer) == (before.gradients, before.optimizer)
    sent, sent_before = (
        {each.op: each.bytes for each in one.estimates.classes[0].traffic if "deepspeed" in each.node}
        for one in (plan, in_fp32)
    )
    assert sent.pop("all_gather") * 2 == sent_before.pop("all_gather") and sent == sent_before


def test_the_extra_is_named_where_the_package_is_missing(tmp_path: Path, found: set[str]):
    found.clear()
    result = compiled(tmp_path, 2)
    assert result.plan is None
    (error,) = result.diagnostics.errors
    assert error.code == "X715" and error.message.startswith("stack deepspeed needs the package deepspeed")
    assert error.hint == "install it with `pip install 'xtrain[deepspeed]'`, or use stack parallel"
    assert compiled(tmp_path, 2, stack="parallel").plan is not None


def test_its_stage_under_another_stack_changes_nothing(tmp_path: Path):
    (warning,) = (each for each in compiled(tmp_path, 2, stack="ddp").diagnostics if each.code == "W401")
    assert "the stack is ddp" in warning.message


def test_its_checkpoints_move_between_stages_and_stacks(tmp_path: Path):
    two, three, other = plan_of(tmp_path, 2), plan_of(tmp_path, 3), plan_of(tmp_path, 2, stack="parallel")
    (reason,) = resumable(two, three).reasons
    assert (reason.kind, reason.path, reason.effect) == ("safe", "parallel.deepspeed.stage", "rounding")
    assert reason.text == "2 → 3: gradients are summed in another order, and ranks have other shards"
    for one, next_one in ((two, other), (other, three)):
        kinds = {each.path: each.kind for each in resumable(one, next_one).reasons}
        assert kinds == {"parallel": "resharded", "parallel.stack": "safe"}
