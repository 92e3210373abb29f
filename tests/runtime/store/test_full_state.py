"""In which order a checkpoint is put back, and that random numbers go on."""

import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from xtrain.planner.load import plan_from_spec
from xtrain.runtime.base import device as streams
from xtrain.runtime.base.state import Progress
from xtrain.runtime.store import full_state
from xtrain.runtime.store.full_state import ORDER, FullState

QUICKSTART = Path(__file__).parents[3] / "specs/quickstart.xtrain"
CPU = torch.device("cpu")


class Noted(Progress):
    """Counters that say when they are put back."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.calls = calls

    def take(self, state: dict[str, Any]) -> None:
        self.calls.append("counters")
        super().take(state)


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """The groups in the order in which they are read."""
    found: list[str] = []
    monkeypatch.setattr(full_state, "read_tensors", lambda tensors, path, collective: found.append(kind_of(tensors)))
    monkeypatch.setattr(full_state, "reshard", lambda model: None)
    monkeypatch.setattr(full_state, "saved_tensors", lambda model, plan: {"model.w": torch.zeros(1)})
    own = {"optimizer.w.step": torch.zeros(1)}
    monkeypatch.setattr(full_state, "optimizer_tensors", lambda model, optimizer, plan: own)
    return found


def kind_of(tensors: dict[str, torch.Tensor]) -> str:
    (kind,) = {name.partition(".")[0] for name in tensors}
    return kind


def state_with(calls: list[str], **given: Any) -> FullState:
    plan = plan_from_spec(QUICKSTART).plan
    assert plan is not None
    loader = SimpleNamespace(state=lambda step: {"step": step, "capacity": 2})
    options: dict[str, Any] = {
        "rank": SimpleNamespace(rank=0, data_rank=0, row_rank=0, replica=None, device=CPU),
        "model": None,
        "ema": SimpleNamespace(tensors=lambda: {"ema.w": torch.zeros(1)}, updates=0, described=lambda: {"updates": 7}),
        "optimizer": None,
        "feed": SimpleNamespace(steps=9, batch=None, datasets={}, epoch=lambda step: None, loader=loader,
            resume=lambda state, past: calls.append("loader")),
        "progress": Noted(calls),
    }  # fmt: skip
    return FullState(plan=plan, **options | given)


def entry_of(said: dict[str, Any]) -> Any:
    return SimpleNamespace(path=Path("somewhere"), state=lambda: said)


def test_model_then_averages_then_optimizer_then_loader_then_counters_and_random_numbers_last(calls):
    taken: list[bytes | None] = []
    own: Any = SimpleNamespace(name="own.npz", take=taken.append)
    state = evolve(state_with(calls), completions=own)
    said = {**state.described(), "step": 4, "tokens": 8}
    restored = state.restore(entry_of(said), None)  # pyright: ignore[reportArgumentType]
    others = [name for name in ORDER if name != "completions"]
    assert calls == others == ["model", "ema", "optimizer", "loader", "counters", "rng"] and ORDER[5] == "completions"
    # There is no file of them in this checkpoint.
    assert list(restored.groups) == others and taken == [None] and restored.groups["rng"] == "own"
    assert (state.progress.step, state.progress.tokens) == (4, 8)
    assert state.ema is not None and state.ema.updates == 7


def test_streams_of_other_ranks_are_not_taken(calls):
    state = state_with(calls)
    said = state.described()
    for other in ({**said["rng"], "axes": [["fsdp", 2]]}, {**said["rng"], "sizes": {"torch": 16}}, None):
        drawn = []
        for before in (1, 2):
            streams.begin(before, 0, 0)
            restored = state.restore(entry_of({**said, "rng": other}), None)  # pyright: ignore[reportArgumentType]
            assert restored.groups["rng"] == "anew"
            drawn.append(random_numbers())
        assert drawn[0] == drawn[1]
    assert "rng" not in calls


def random_numbers() -> list[float]:
    return [torch.rand(()).item(), random.gauss(0, 1), float(np.random.standard_normal()), torch.randn(()).item()]


@pytest.mark.parametrize("odd", [0, 1])
def test_streams_go_on_in_the_middle_of_a_pair_of_normal_numbers(odd):
    streams.begin(3, 5, 1)
    for _ in range(odd):
        random_numbers()
    saved = streams.streams(CPU)
    expected = [random_numbers() for _ in range(3)]
    streams.put_back(saved, CPU)
    assert [random_numbers() for _ in range(3)] == expected
    for left_out in saved:
        streams.put_back({name: each for name, each in saved.items() if name != left_out}, CPU)
        assert [random_numbers() for _ in range(3)] != expected, left_out


def test_streams_begin_by_seed_step_and_rows():
    found = []
    for key in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)):
        streams.begin(*key)
        found.append(tuple(random_numbers()))
    assert len(set(found)) == 4 and found[0] == found[-1]


def test_what_a_checkpoint_says_of_its_run_has_its_names(calls):
    """Files of runs are read by other commands, and by later versions."""
    state = state_with(calls, base={"digest": "d"})
    state.progress.step, state.progress.tokens = 4, 8
    state.progress.measured |= {"now": (4, 2.5), "before": (3, 1.0), "none": (4, float("nan"))}
    said = state.described()
    names = "buffers ema loader metrics model nonfinite optimizer params rng step steps tensors time tokens world_size"
    assert said.keys() == {*names.split(), "plan_id", "config_id", "base_content"}
    expected = {
        "step": 4, "tokens": 8, "steps": 9, "metrics": {"now": 2.5}, "world_size": 1, "ema": {"updates": 7},
        "plan_id": state.plan.id, "config_id": state.plan.config_id, "loader": {"step": 4, "capacity": 2},
        "base_content": {"digest": "d"}, "optimizer": "adamw", "params": "fp32", "buffers": {},
    }  # fmt: skip
    assert {name: said[name] for name in expected} == expected
    assert abs(said["time"] - time.time()) < 60 and said["tensors"]["norm.weight"] == [128]
