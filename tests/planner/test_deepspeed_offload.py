"""What DeepSpeed keeps in host memory and in files: settings, configuration, memory of a plan, and what is refused."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from attrs import evolve

from xtrain.dsl.load import load_spec
from xtrain.plan.estimates import Memory
from xtrain.plan.plan import Plan
from xtrain.plan.serialise import dumps, from_json
from xtrain.planner.compile import Compiled, compile_plan
from xtrain.planner.review.resumable import resumable
from xtrain.planner.rules import validate as stack_rules
from xtrain.planner.rules.validate import check_spec
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.state import Rank
from xtrain.runtime.inspect import doctor as checks
from xtrain.runtime.inspect.machine import DiskFacts, MachineFacts

SPEC = """
experiment tiny {{ seed = 1, budget = 100 steps }}
model llama {{ dim = 64, layers = 2, heads = 8 }}
tokenizer bytes
dataset code {{ source = python_stdlib() }}
batch {{ sequence = 64, micro = 2, accumulate = 3 }}
optimizer adamw {{ lr = 1e-3, clip = 0.7 }}
launch {{ ranks_per_node = 4, device = cuda }}
cluster other {{ flops = 1e9, memory = 1 GiB }}
parallel {{ stack = deepspeed, deepspeed {{ {own} }} }}
{more}
"""
BF16 = "precision { compute = bf16 }"
CPU, NVME = "offload_optimizer = cpu", 'offload_optimizer = nvme, nvme_path = "/nvme"'


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_rules, "is_installed", lambda package: True)


def compiled(folder: Path, own: str, more: str = "") -> Compiled:
    (folder / "spec.xtrain").write_text(SPEC.format(own=own, more=more))
    return compile_plan(load_spec(folder / "spec.xtrain").require())


def plan_of(folder: Path, own: str, more: str = "") -> Plan:
    found = compiled(folder, own, more)
    assert found.plan is not None, found.diagnostics.render()
    return found.plan


def memory(plan: Plan) -> Memory:
    return plan.estimates.classes[0].memory


def sizes(plan: Plan) -> tuple[int, int]:
    """Numbers of a rank's piece, and of the largest parameter."""
    numbers = [tensor.size for tensor in plan.parameters.tensors]
    return sum(numbers) // 4, max(numbers)


def zero_of(plan: Plan) -> dict:
    return plan.node("setup.parallel.deepspeed").args["config"]["zero_optimization"]


@pytest.mark.parametrize(("own", "each"), [(NVME, 4 * (2 + 2)), (f"{NVME}, offload_param = nvme", 4 * (2 + 2 + 1))])
def test_files_need_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, each: int):
    """For weights, their gradients and both moments, and for what is computed with; on a disk of each machine."""
    from xtrain.components.stacks import deepspeed_files_torch
    from xtrain.components.stacks.deepspeed_files_torch import check_room

    plan = plan_of(tmp_path, f"stage = 3, {own}")
    files, numbers = plan.node("setup.parallel.deepspeed").args["files"], -(-sizes(plan)[0] // 1024) * 1024
    assert files == {"folder": "/nvme", "bytes": each * numbers, "setting": "parallel.deepspeed.nvme_path"}
    assert "files of at most" in plan.node("setup.parallel.deepspeed").does
    for free, codes in ((4 * files["bytes"], []), (4 * files["bytes"] - 1, ["X730"])):
        monkeypatch.setattr(checks, "look_at_disk", lambda folder, free=free: DiskFacts(folder=folder, free=free))
        assert [found.code for found in checks.of_files(plan)] == codes
    monkeypatch.setattr(checks, "look_at_disk", lambda folder: DiskFacts(folder=folder, free=0, fault="full"))
    assert [found.code for found in checks.of_files(plan)] == ["X706"]
    config = {"zero_optimization": {"offload_optimizer": {"nvme_path": str(tmp_path / "new" / "run")}}}
    rank, free = cast(Rank, SimpleNamespace(rank=1)), 1000
    monkeypatch.setattr(deepspeed_files_torch.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    given = {"folder": str(tmp_path / "new"), "setting": files["setting"]}
    check_room(config, rank, **given, bytes=free)
    with pytest.raises(EnvironmentFault, match=f"are free in {tmp_path}"):
        check_room(config, rank, **given, bytes=free + 8)
    left = tmp_path / "new" / "run" / "zero_stage_3" / "optimizer" / "rank1"
    left.mkdir(parents=True)
    (left / "0.tensor.swp").write_bytes(bytes(8))
    check_room(config, rank, **given, bytes=free + 8)
    assert "files" not in plan_of(tmp_path, f"stage = 3, {CPU}").node("setup.parallel.deepspeed").args


@pytest.mark.parametrize("stage", [1, 2])
def test_moments_and_exact_weights_go_to_host_memory(tmp_path: Path, stage: int):
    """In host memory: weights, the same on their way back, gradients, both moments, a parameter's gradients on their
    way, and in stage 2 sums of microbatches, in which a parameter at either end of the piece is whole."""
    plan = plan_of(tmp_path, f"stage = {stage}, {CPU}")
    piece, largest = sizes(plan)
    own, there = memory(plan), memory(plan_of(tmp_path, f"stage = {stage}"))
    sums = min(4 * piece, piece + 2 * largest) if stage == 2 else 0
    assert own.host == 4 * (piece * (1 + 1 + 1 + 2) + largest + sums) and not own.offloaded
    assert own.parameters == there.parameters - 4 * piece and own.optimizer == 0
    assert own.gradients == 4 * (largest + (4 * piece if stage == 1 else 0))
    assert own.total_bytes < there.total_bytes
    assert own.host_bytes == own.host and there.host_bytes == 0
    alone = plan_of(tmp_path, f"stage = {stage}, {CPU}", "batch { accumulate = 1 }")
    assert own.host - memory(alone).host == 4 * sums


def test_in_bf16_sums_stay_on_the_device(tmp_path: Path):
    plan = plan_of(tmp_path, f"stage = 2, {CPU}", BF16)
    piece, largest = sizes(plan)
    own = memory(plan)
    assert own.host == piece * (4 + 2 + 4 + 8) + 2 * largest
    assert (own.parameters, own.gradients, own.optimizer) == (2 * 4 * piece, 4 * piece + 2 * largest, 0)


@pytest.mark.parametrize(("own", "more", "parameters", "gradients", "host"), [
    (CPU, "", 4, 0, 4 + 2 * 4 + 8),
    (CPU, BF16, 2, 0, 4 + 2 * 4 + 8),
    (f"{CPU}, offload_param = cpu", "", 0, 0, 4 + 4 + 2 * 4 + 8),
    (f"{CPU}, offload_param = cpu", BF16, 0, 0, 2 + 4 + 2 * 4 + 8),
    ("offload_param = cpu", BF16, 4, 4, 2),
    (f'{CPU}, offload_param = nvme, nvme_path = "/nvme"', BF16, 0, 0, 4 + 2 * 4 + 8),
])  # fmt: skip
def test_in_stage_3_hardly_anything_is_left(tmp_path: Path, own, more, parameters, gradients, host):
    """Bytes for each number of a rank's piece."""
    plan = plan_of(tmp_path, f"stage = 3, {own}", more)
    piece, found = sizes(plan)[0], memory(plan)
    assert (found.parameters, found.gradients, found.host) == (piece * parameters, piece * gradients, piece * host)
    assert found.unsharded == memory(plan_of(tmp_path, "stage = 3", more)).unsharded


def test_of_files_only_buffers_are_in_memory(tmp_path: Path):
    """Gradients, and as many buffers as a group has tensors, of a group's numbers in whole kilobytes."""
    plan = plan_of(tmp_path, f"stage = 3, {NVME}", BF16)
    piece, found = sizes(plan)[0], memory(plan)
    assert found.host == 4 * piece + 4 * 4 * (-(-piece // 1024) * 1024)
    assert (found.parameters, found.gradients, found.optimizer) == (2 * piece, 0, 0)


def test_on_a_cpu_the_device_is_the_host(tmp_path: Path):
    """Nothing is saved there, and it is said so."""
    result = compiled(tmp_path, f"stage = 3, {CPU}", "launch { device = cpu }")
    assert result.plan is not None
    own, elsewhere = memory(result.plan), memory(plan_of(tmp_path, f"stage = 3, {CPU}"))
    assert own.host == 0 and own.states == elsewhere.states + elsewhere.host
    (warning,) = (each for each in result.diagnostics if each.code == "W401")
    assert warning.message == "offload_optimizer has no effect: the device of the ranks is the host itself"


def test_the_configuration_says_all_of_it(tmp_path: Path):
    zero = zero_of(plan_of(tmp_path, f"stage = 2, {CPU}, pin_memory = false"))
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": False} and zero["compute_grad_norm"]
    assert "offload_optimizer" not in zero_of(plan := plan_of(tmp_path, "stage = 2"))
    assert not zero_of(plan)["compute_grad_norm"]
    both = plan_of(tmp_path, f"stage = 3, {NVME}, offload_param = nvme", "optimizer lion { lr = 1e-3 }")
    optimizer, params = (zero_of(both)[f"offload_{name}"] for name in ("optimizer", "param"))
    assert (
        optimizer["device"] == params["device"] == "nvme" and optimizer["nvme_path"] == params["nvme_path"] == "/nvme"
    )
    assert optimizer["buffer_count"] == 3, "weights, gradients and the one moment of lion"
    assert params["buffer_size"] == -(-sizes(both)[1] // 4 // 1024) * 1024 and params["max_in_cpu"] == 0
    assert both.node("setup.parallel.deepspeed").args["config"]["aio"]["block_size"] == 2**20


def test_the_node_says_where_what_is(tmp_path: Path):
    node = plan_of(tmp_path, f"stage = 3, {CPU}, offload_param = cpu", BF16).node("setup.parallel.deepspeed")
    assert (node.args["offload_optimizer"], node.args["offload_param"]) == ("cpu", "cpu")
    assert "stored in host memory and updated on the CPU: in a step a rank sends 137 KiB of gradients" in node.does
    assert "68.3 KiB of weights; parameters are stored in host memory and fetched by each forward" in node.does
    assert "files below /nvme" in plan_of(tmp_path, f"stage = 3, {NVME}").node("setup.parallel.deepspeed").does
    assert "offload_param" not in plan_of(tmp_path, f"stage = 3, {CPU}").node("setup.parallel.deepspeed").args


@pytest.mark.parametrize(("own", "more", "path", "says"), [
    (f"stage = 0, {CPU}", "", "offload_optimizer", "stage 0 of stack deepspeed does not shard the optimizer state"),
    ("stage = 2, offload_param = cpu", "", "offload_param", "stage 2 of stack deepspeed does not shard the parameters"),
    (f"stage = 2, {NVME}", "", "offload_optimizer", "stage 2 of stack deepspeed offloads only to host memory"),
    ("stage = 3, offload_optimizer = nvme", "", "nvme_path", "is nvme, and stack deepspeed needs a folder for it"),
    (f"stage = 3, {NVME}", "optimizer { states = bf16 }", "states", "moments to files only as fp32"),
])  # fmt: skip
def test_what_cannot_be_offloaded_is_refused(tmp_path: Path, own: str, more: str, path: str, says: str):
    (tmp_path / "spec.xtrain").write_text(SPEC.format(own=own, more=more))
    (error,) = check_spec(load_spec(tmp_path / "spec.xtrain").require(), 4).errors
    assert error.code == "X415" and says in error.message
    assert "stack parallel" in (error.hint or "") and error.span is not None


@pytest.mark.parametrize(
    ("own", "says"),
    [("stage = 2, pin_memory = false", "pin_memory has no effect: nothing is offloaded"),
        (f'stage = 2, {CPU}, nvme_path = "/x"', "nvme_path has no effect: nothing is offloaded to nvme")],
)  # fmt: skip
def test_a_setting_without_effect_is_said(tmp_path: Path, own: str, says: str):
    assert [each.message for each in compiled(tmp_path, own).diagnostics if each.code == "W401"] == [says]


def test_it_is_named_where_a_run_does_not_fit(tmp_path: Path):
    for own, way in (("stage = 1", "optimizer"), (f"stage = 3, {CPU}", "param")):
        plan = plan_of(tmp_path, own, "cluster { memory = 1025 MiB }\nmodel { dim = 512, layers = 1 }")
        sets = [each.sets for each in plan.estimates.remedies]
        assert any(f"parallel.deepspeed.offload_{way}=cpu" in each for each in sets), (own, sets)


def test_checkpoints_go_on_without_it(tmp_path: Path):
    (reason,) = resumable(plan_of(tmp_path, "stage = 3"), plan_of(tmp_path, f"stage = 3, {CPU}")).reasons
    assert (reason.kind, reason.path, reason.effect) == ("safe", "parallel.deepspeed.offload_optimizer", "rounding")


def test_a_plan_keeps_it(tmp_path: Path):
    plan = plan_of(tmp_path, f"stage = 3, {CPU}")
    assert memory(from_json(json.loads(dumps(plan)))) == memory(plan)
    assert '"host"' not in dumps(plan_of(tmp_path, "stage = 3"))


def test_the_doctor_counts_host_memory(tmp_path: Path):
    plan = plan_of(tmp_path, f"stage = 3, {CPU}", "checkpoint { mode = sync }")
    need = 4 * memory(plan).host
    machine = MachineFacts(host="a", memory=2 * need, shared_memory=1, driver=None, cuda=None, versions={})
    assert list(checks.of_memory(plan, machine, "cuda")) == []
    (found,) = checks.of_memory(plan, evolve(machine, memory=need - 1), "cuda")
    assert found.code == "X737"
