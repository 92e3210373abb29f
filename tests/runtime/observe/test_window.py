"""What a record says of steps that were left out, and of the first one: nothing of their time is in it."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from xtrain.components.actions import log_torch
from xtrain.plan.estimates import Work
from xtrain.runtime.base.state import Progress
from xtrain.runtime.feed.microbatch import DocumentSums
from xtrain.runtime.loop.metrics import Rates, Window
from xtrain.runtime.nn.batch import Step
from xtrain.runtime.observe.heartbeat import WAITS
from xtrain.runtime.observe.records import Records

TIMES = {
    "tokens_per_second", "step_seconds", "data_seconds", "tflops", "mfu", "comm_seconds", "valid_tokens_per_second",
}  # fmt: skip


@pytest.fixture
def logged(tmp_path, monkeypatch):
    """Writes the records of a window on a single rank; gives them, of the run and of the rank."""
    monkeypatch.setattr(WAITS, "measured", True)
    window = Window(
        losses=SimpleNamespace(add=lambda rows: None, take=dict, clear=lambda: None, unlabelled=lambda rows: []),  # type: ignore[arg-type]
        rates=Rates(work=Work(position=2, pair=1), devices=1, peak=1e12),
        sequence=64,
        node_seconds={"step.fetch": 0.0},
    )
    records, progress = Records.open(tmp_path, 0), Progress()
    taken = {"rows_taken": lambda step: {}, "epoch": lambda step: None}
    feed = SimpleNamespace(phase=lambda index: SimpleNamespace(name="train"), **taken)
    rank = SimpleNamespace(device=torch.device("cpu"), world_size=1, replica=None)
    plan = SimpleNamespace(
        architecture=SimpleNamespace(is_moe=False, expert_layers=(), learning_indexers=0),
        node=lambda id: SimpleNamespace(args={}),
    )
    parts: Any = (plan, torch.nn.Module(), feed, rank, records, progress, window)
    write = log_torch.log(*parts)

    def log(*seconds: float, warms_up: float | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        before = [] if warms_up is None else [warms_up]
        for number, each in enumerate((*before, *seconds)):
            step = Step(index=progress.step, rows=1, began=100.0, valid_tokens=60)
            step.documents = DocumentSums(60, 3600, 3600)
            step.warms_up = number < len(before)
            window.add(step, 100.0 + each)
            if not step.warms_up:
                window.node_seconds["step.fetch"] += each
        progress.step += 1
        write(Step(index=progress.step - 1, loss=2.0, grad_norm=1.0))
        records.flush(progress.step)
        records.settle()
        return tuple(
            json.loads((tmp_path / name).read_text().splitlines()[-1])
            for name in ("metrics.jsonl", "ranks/00000.jsonl")
        )

    yield log
    records.close()


def test_a_window_of_no_step_has_no_times(logged):
    run, own = logged()
    assert not TIMES & run.keys() and run["valid_tokens"] == 0 and run["memory_bytes"] > 0
    assert not (TIMES | {"node_seconds"}) & own.keys() and own["memory_bytes"] > 0


def test_times_are_those_of_the_steps_that_were_done(logged):
    logged()
    run, own = logged(1.0, 3.0)
    assert run.keys() >= TIMES and run["step_seconds"] == 2.0 and run["tokens_per_second"] == 32.0
    assert own["step_seconds"] == 2.0 and own["node_seconds"] == {"step.fetch": 2.0}


def test_the_first_step_of_a_start_is_in_no_average_and_its_tokens_are_counted(logged):
    run, own = logged(1.0, 3.0, warms_up=90.0)
    assert run["step_seconds"] == 2.0 and run["tokens_per_second"] == 32.0 and run["valid_tokens_per_second"] == 30.0
    assert run["valid_tokens"] == 180 and own["step_seconds"] == 2.0
    assert run["mfu"] == pytest.approx(2 * (2 * 60 + 3600) / 4.0 / 1e12)


def test_a_window_of_the_first_step_alone_has_no_times(logged):
    run, own = logged(warms_up=90.0)
    assert not TIMES & run.keys() and run["valid_tokens"] == 60 and run["loss"] == 2.0
    assert not (TIMES | {"node_seconds"}) & own.keys()
