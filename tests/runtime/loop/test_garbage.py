"""Collections of Python's garbage: between steps where a plan says so, and steps that need none."""

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
import torch

from xtrain.planner.load import plan_from_text
from xtrain.runtime.base.process import collected_garbage
from xtrain.runtime.loop.executor import Executor
from xtrain.runtime.loop.own_loops import Course
from xtrain.runtime.loop.training_loop import TrainingLoop

SPEC = """
experiment small {{ budget = 6 steps }}
model qwen3_moe {{ dim = 32, layers = 2, heads = 2, experts = 4, experts_per_token = 2, expert_ffn = 16 }}
tokenizer bytes
dataset made {{ source = synthetic(documents = 50, length = 40) }}
batch {{ sequence = 64, micro = 2, accumulate = 2 }}
optimizer adamw {{ lr = 1e-3, clip = 1.0 }}
precision {{ params = fp32, compute = bf16 }}
activation selective
launch {{ device = {device} }}
every 1 step log
checkpoint {{ enabled = false }}
"""


class Ring:
    """An object that only a collection frees."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture
def few_objects() -> Iterator[None]:
    """Hide the millions of objects of other tests from collections, each of which would take a second."""
    gc.freeze()
    yield
    gc.freeze()


def counted(steps: int | None) -> list[int]:
    """The rings that are left after each of six steps, which make one each."""
    left, rings = [], WeakSet[Ring]()
    with collected_garbage(steps) as collect:
        for step in range(1, 7):
            rings.add(Ring())
            collect(step)
            left.append(len(rings))
    return left


@pytest.mark.usefixtures("few_objects")
def test_garbage_is_collected_every_few_steps():
    was = gc.isenabled()
    try:
        gc.enable()
        assert counted(3) == [1, 2, 0, 1, 2, 0]
        assert gc.isenabled() and gc.get_freeze_count() == 0
        gc.disable()
        assert counted(3) == [1, 2, 3, 4, 5, 6]  # whoever has disabled it decides
        assert not gc.isenabled()
    finally:
        (gc.enable if was else gc.disable)()
        gc.collect()


def test_a_run_on_cuda_collects_as_planned_and_a_run_on_a_cpu_as_python_does(tmp_path, monkeypatch):
    asked: list[int | None] = []

    class Stop(Exception):
        pass

    def stop(steps):
        asked.append(steps)
        raise Stop

    monkeypatch.setattr("xtrain.runtime.loop.training_loop.collected_garbage", stop)
    for device in ("cpu", "cuda"):
        found = plan_from_text(SPEC.format(device="auto"), "s.xtrain")
        assert found.plan is not None

        rank = SimpleNamespace(device=torch.device(device))
        loop: Any = object.__new__(TrainingLoop)
        loop.plan, loop.nodes = found.plan, SimpleNamespace(resources={"rank": rank})
        with pytest.raises(Stop):
            loop.run()
    assert asked == [None, 50]


@pytest.mark.usefixtures("few_objects")
def test_steps_leave_no_tensors_to_a_collection(tmp_path):
    """Otherwise memory of a GPU would grow until the next one."""
    found = plan_from_text(SPEC.format(device="cpu"), "s.xtrain")
    assert found.plan is not None, found.diagnostics.render()
    garbage: list[int] = []
    was = gc.isenabled()

    def collect(step: int) -> None:
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        garbage.append(sum(issubclass(type(each), torch.Tensor) for each in gc.garbage))
        gc.garbage.clear()

    course = TrainingLoop._course

    def course_after_a_collection(self: TrainingLoop, _: Any) -> Course:
        gc.collect()  # what the set-up has left
        return course(self, collect)

    try:
        gc.disable()
        TrainingLoop._course = course_after_a_collection  # type: ignore[method-assign]
        assert Executor(found.plan, tmp_path / "run", rank=0).run() == "done"
    finally:
        TrainingLoop._course = course  # type: ignore[method-assign]
        (gc.enable if was else gc.disable)()
    assert garbage == [0] * 6
