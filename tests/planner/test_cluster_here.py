"""`cluster here`: figures of a measured machine, which decide nothing in a run; and uses of memory that is left."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from xtrain.components.clusters import here
from xtrain.dsl.checking import inspections
from xtrain.dsl.checking.inspections import ChildFailed
from xtrain.dsl.load import load_spec
from xtrain.dsl.schema.model import executing_nothing
from xtrain.plan.serialise import dumps, from_json
from xtrain.planner.compile import compile_plan
from xtrain.planner.review.page import render
from xtrain.planner.review.spare import uses_of_memory

CPU = {
    "device": "cpu",
    "name": "Any CPU, 8 cores",
    "devices": 1,
    "reached": 0.5,
    "busy": False,
    "at": "2026-01-02 03:04 UTC",
    "sheet": {
        "memory": 16 * 2**30, "flops": {"fp32": 4e11, "bf16": 8e11}, "link": 1e9, "network": None, "capability": 0,
        "bandwidth": 2e10, "shared": True,
    },
}  # fmt: skip
FAST = {**CPU, "at": "2026-05-06 07:08 UTC", "sheet": {**CPU["sheet"], "flops": {"fp32": 9e11}, "link": 9e9}}
GPUS = {
    **CPU,
    "device": "cuda",
    "name": "NVIDIA Any",
    "devices": 4,
    "reached": None,
    "sheet": {**CPU["sheet"], "flops": {"fp32": 1e13, "bf16": 1e14}, "capability": 9, "shared": False},
}
HERE = "cluster here"


@pytest.fixture
def machine(monkeypatch):
    """`machine(found)`: what the child process writes, or the exception that ends it."""
    here.machine_here.cache_clear()

    def measured(found):
        def inspected(*_):
            if isinstance(found, Exception):
                raise found
            return found

        here.machine_here.cache_clear()
        monkeypatch.setattr(inspections, "inspected", inspected)

    yield measured
    here.machine_here.cache_clear()


def test_a_plan_has_memory_and_time_of_the_machine(machine, make_plan):
    machine(CPU)
    one, two = make_plan(cluster=HERE), make_plan(world=2, cluster=HERE, parallel="parallel { fsdp auto }")
    assert (one.cluster.memory_bytes, one.cluster.flops, one.launch["device"]) == (16 * 2**30, 4e11, "cpu")
    assert (two.cluster.memory_bytes, two.cluster.flops, two.cluster.nodes) == (8 * 2**30, 2e11, 1)
    assert one.cluster.efficiency == (0.4, 0.6)
    for plan in (one, two):
        text = render(plan)
        assert "measured on this machine: Any CPU, 8 cores, 2026-01-02 03:04 UTC" in text
        assert plan.estimates.times is not None and "unknown:" not in text.partition("MODEL")[0]


def test_a_given_figure_replaces_a_measured_one(machine, make_plan):
    machine(CPU)
    plan = make_plan(cluster="cluster here { memory = 2 GiB, efficiency = 30%, price = 2 }")
    assert plan.cluster.memory_bytes == 2 * 2**30
    assert (plan.cluster.efficiency, plan.cluster.flops, plan.cluster.price) == ((0.3, 0.3), 4e11, 2)


def test_the_speed_of_a_machine_is_not_in_the_id_and_other_devices_are(machine, make_plan):
    plans = []
    for found in (CPU, FAST, GPUS):
        machine(found)
        plans.append(make_plan(world=2, cluster=HERE, parallel="parallel { fsdp auto }"))
    slow, fast, gpus = plans
    assert slow.id == fast.id != gpus.id
    assert slow.estimates.times.step > fast.estimates.times.step
    assert from_json(json.loads(dumps(slow))).id == slow.id


@pytest.mark.parametrize(("world", "blocks", "needed"), [
    (8, {"launch": "launch { ranks_per_node = 8 }", "parallel": "parallel { fsdp 8 }"}, "needs 8 devices of a machine"),
    (8, {"launch": "launch { nodes = 2 }", "parallel": "parallel { fsdp 8 }"}, "needs 2 machines"),
])  # fmt: skip
def test_a_run_fits_on_the_machine(machine, compiled, world, blocks, needed):
    machine(GPUS)
    assert needed in compiled(world, cluster=HERE, **blocks).diagnostics.render()


def test_a_run_uses_all_gpus_of_the_machine(machine, make_plan):
    machine(GPUS)
    plan = make_plan(cluster=HERE, parallel="parallel { fsdp auto }")
    assert (plan.mesh.world_size, plan.launch["device"]) == (4, "cuda")


@pytest.mark.parametrize("found", [ChildFailed("torch is broken"), {"problem": "torch is broken"}])
def test_a_machine_that_cannot_be_measured_is_unknown(machine, make_plan, found):
    machine(found)
    plan = make_plan(cluster=HERE)
    assert "unknown cluster.measured: memory and speed of this machine: torch is broken" in render(plan)
    assert plan.estimates.times is None and plan.cluster.measured is None


def test_a_check_measures_nothing_and_a_plan_only_once(monkeypatch, tmp_path, load):
    here.machine_here.cache_clear()
    inspections.inspected.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    started = []

    def child(command, **_):
        started.append(command[2])
        Path(command[4]).write_text(json.dumps(CPU))

    monkeypatch.setattr(subprocess, "run", child)
    with executing_nothing():
        assert load(cluster=HERE).cluster.measured() is None
    assert started == []
    for _ in range(2):
        here.machine_here.cache_clear()
        inspections.inspected.cache_clear()
        assert load(cluster=HERE).cluster.measured().name == "Any CPU, 8 cores"
    assert started == ["xtrain.runtime.inspect.machine_speed"]
    with executing_nothing():
        assert load(cluster=HERE).cluster.measured() is not None
    here.machine_here.cache_clear()


def test_a_busy_machine_is_measured_again(monkeypatch, tmp_path, load):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = iter([{**CPU, "busy": True}, CPU, FAST])
    monkeypatch.setattr(subprocess, "run", lambda command, **_: Path(command[4]).write_text(json.dumps(next(found))))
    times = []
    for _ in range(3):
        here.machine_here.cache_clear()
        inspections.inspected.cache_clear()
        times.append(load(cluster=HERE).cluster.measured().at)
    here.machine_here.cache_clear()
    assert times == [f"{CPU['at']}, while the machine was busy", CPU["at"], CPU["at"]]


def test_a_child_process_measures_this_machine(tmp_path):
    """With the shortest repetitions: the figures are not looked at."""
    code = (
        "import json, sys\n"
        "from xtrain.runtime.inspect import machine_speed as speed\n"
        "speed.LONGEST, speed.SIDES, speed.COPIED, speed.SENT, speed.LENGTH = 0.0, (64,), 1 << 20, 1 << 16, 32\n"
        "print(json.dumps(speed.main(json.loads(sys.argv[1]))))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(here.facts())], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == CPU.keys() and found["sheet"].keys() == CPU["sheet"].keys()
    assert found["sheet"]["memory"] > 2**28 and all(speed > 0 for speed in found["sheet"]["flops"].values())


BIG = "model llama { dim = 4Ki, layers = 8, heads = 32, kv_heads = 8, ffn = 14Ki, vocab = 128k }"
BLOCKS = {
    "model": BIG,
    "batch": "batch { sequence = 8Ki, micro = 1, accumulate = 4 }",
    "precision": "precision { compute = bf16 }",
}
FOUR = ("batch.micro=4", "batch.accumulate=1")


@pytest.mark.parametrize(("memory", "activation", "uses"), [
    (80, "full", [("activation.mode=none",), FOUR]),
    (24, "full", [("activation.mode=selective",), FOUR]),
    (19, "full", [("batch.micro=2", "batch.accumulate=2")]),
    (15, "full", []),
    (80, "none", [FOUR]),
    (50, "none", [("batch.micro=2", "batch.accumulate=2")]),
])  # fmt: skip
def test_uses_of_memory_are_planned(make_plan, load, memory, activation, uses):
    blocks = {
        **BLOCKS,
        "activation": f"activation {activation} {{}}",
        "cluster": f"cluster h100 {{ devices = 8, memory = {memory} GiB }}",
    }
    plan, spec = make_plan(**blocks), load(**blocks)
    found = uses_of_memory(plan, spec)
    assert [use.sets for use in found] == uses
    for use in found:
        changed = compile_plan(load_spec(spec.path, use.sets).require(), world=plan.mesh.world_size).plan
        assert changed is not None and changed.estimates.fullest.memory.total_bytes == use.memory_bytes
        assert changed.estimates.times is not None
        assert changed.estimates.times.step == pytest.approx(use.seconds)
        assert changed.config_id == plan.config_id
        assert f"room for --set {use.sets[0]}" in render(plan, spare=found)
