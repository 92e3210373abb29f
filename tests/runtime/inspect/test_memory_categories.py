"""What is held, counted: each storage once, by what it is for; and the page that says it."""

import gc
import json
import pickle
from pathlib import Path

import pytest
import torch
from one_rank import one_rank
from torch import nn

from xtrain.components.actions import memory_snapshot_torch as module
from xtrain.components.actions.memory_snapshot_torch import Snapshot
from xtrain.plan.estimates import Memory
from xtrain.runtime.base.state import Progress
from xtrain.runtime.loop.memory_report import CATEGORIES, memory_by_category
from xtrain.runtime.observe.heartbeat import HeartbeatWriter
from xtrain.runtime.observe.records import Records

CPU = torch.device("cpu")
FLOAT = 4
PLANNED = Memory(parameters=480, gradients=480, optimizer=960, activations=2**20)


class Model(nn.Module):
    """120 parameters, of which a tied one counts once, and a buffer of 7."""

    def __init__(self, device: torch.device = CPU) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10, device=device)
        self.second = nn.Linear(10, 10, device=device)
        self.second.weight = self.first.weight
        self.register_buffer("counts", torch.zeros(7, device=device))


def trained(device: torch.device = CPU) -> tuple[Model, torch.optim.Optimizer]:
    model = Model(device)
    optimizer = torch.optim.AdamW(model.parameters())
    model.second(model.first(torch.ones(3, 10, device=device))).sum().backward()
    optimizer.step()
    return model, optimizer


def counted(model, optimizer, averages=(), device=CPU):
    return memory_by_category(model, optimizer, averages, device)


def test_every_storage_once_by_what_it_is_for():
    gc.collect()  # what other tests have left may go at any time
    model, optimizer = trained()
    averages = [parameter.detach().clone() for parameter in model.parameters()]
    before = counted(model, optimizer, averages)
    weights = FLOAT * (100 + 10 + 10)
    states = {name: before.device[name] for name in CATEGORIES[:-1]}
    assert states == {
        "parameters": weights, "gradients": weights, "optimizer": 2 * weights, "averages": weights, "unsharded": 0,
        "buffers": 7 * FLOAT,
    }  # fmt: skip
    views = [model.first.weight[2:], model.counts.view(7, 1), averages[0].t()]
    tensor = torch.zeros(10_000_000)
    parts = [tensor[:10], tensor[10:], tensor.view(torch.int32)]
    after = counted(model, optimizer, averages)
    assert {name: after.device[name] for name in states} == states and len(views) == len(parts)
    assert after.device["other"] - before.device["other"] == 40_000_000
    assert (40_000_000, "float32", [10_000_000]) in after.largest and len(after.largest) <= 10
    optimizer.zero_grad()
    del tensor, parts
    gone = counted(model, optimizer, averages)
    assert gone.device["gradients"] == 0 and gone.device["other"] == before.device["other"]
    assert set(gone.host.values()) == {0}


def test_tensors_without_memory_count_nothing():
    model, optimizer = trained()
    before = counted(model, optimizer)
    odd = [torch.empty(10**6, device="meta"), torch.eye(50).to_sparse(), torch.empty(0)]
    after = counted(model, optimizer)
    assert after.device["other"] - before.device["other"] < 10**4 and len(odd) == 3


class Run:
    def __init__(self, folder: Path, device: torch.device = CPU) -> None:
        self.records, self.progress = Records.open(folder, 0), Progress(step=20)
        self.model, self.optimizer = trained(device)
        self.rank = one_rank(device=device)

    def snapshot(self, history: int = 0) -> Snapshot:
        return Snapshot(
            node="tick.memory_snapshot",
            ranks=None,
            history=history,
            model=self.model,  # type: ignore[arg-type]
            optimizer=self.optimizer,
            ema=None,
            planned=PLANNED,
            rank=self.rank,
            records=self.records,
            progress=self.progress,
            beat=HeartbeatWriter(),
        )

    @property
    def events(self) -> list[dict]:
        return [json.loads(line) for line in (self.records.directory / "events.jsonl").read_text().splitlines()]

    def folder(self, step: int) -> Path:
        return self.records.directory / f"profile/memory-{step:012d}"


@pytest.fixture
def run(tmp_path):
    found = Run(tmp_path)
    yield found
    found.records.close()


def test_a_snapshot_says_what_is_in_use_beside_what_is_planned(run):
    assert not run.snapshot(history=3).begin(), "a cpu's allocator is not watched"
    found = json.loads((run.folder(20) / "rank-00000.json").read_text())
    assert found["held"]["parameters"] == found["planned"]["parameters"] == 480
    assert found["planned"]["total"] == PLANNED.total_bytes and found["history_steps"] == 0
    assert found["allocator"] is None and found["held_in_host"] is None
    assert 0 < found["process"]["resident_bytes"] <= 1.1 * found["process"]["peak_bytes"]
    (event,) = run.events
    size = sum(path.stat().st_size for path in run.folder(20).iterdir())
    assert (event["event"], event["step"], event["bytes"], event["ranks"]) == ("memory_snapshot", 20, size, 1)
    assert event["held"] == found["held"] and event["planned"] == found["planned"]
    page = (run.folder(20) / "summary.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    assert ["parameters", "480 B", "480 B"] in rows and ["activations, at the peak", "1.00 MiB", ""] in rows
    run.snapshot().begin()
    assert run.folder(20).with_name(run.folder(20).name + "-2").is_dir(), "a step that was trained again"


def test_a_snapshot_that_cannot_be_written_is_reported(run, monkeypatch):
    (run.records.directory / "profile").write_text("")
    assert not run.snapshot().begin()
    (warning,) = run.events
    assert warning["event"] == "warning" and "rank 0 could not write its memory snapshot" in warning["message"]


def test_a_page_that_cannot_be_written_is_reported_and_no_matter(run, monkeypatch):
    monkeypatch.setattr(module, "snapshot_text", lambda *_, **__: 1 / 0)
    run.snapshot().begin()
    assert [path.name for path in run.folder(20).iterdir()] == ["rank-00000.json"]
    warning, taken = run.events
    assert warning["event"] == "warning" and "could not be written: division by zero" in warning["message"]
    assert taken["event"] == "memory_snapshot" and taken["bytes"] == (run.folder(20) / "rank-00000.json").stat().st_size


@pytest.mark.gpu
def test_of_a_gpu_the_allocator_is_watched(tmp_path):
    run = Run(tmp_path, torch.device("cuda"))
    snapshot = run.snapshot(history=2)
    assert snapshot.begin() and not run.folder(20).exists()
    tensors = []
    for going_on in (True, False):
        tensors.append(torch.ones(1 << 20, device="cuda"))
        run.progress.step += 1
        assert snapshot.after_step() == going_on
    found = json.loads((run.folder(22) / "rank-00000.json").read_text())
    assert found["held"]["parameters"] == 480 and found["history_steps"] == 2
    assert found["held"]["other"] >= 2 * (4 << 20) and found["allocator"]["allocated_bytes"] >= found["held"]["other"]
    history = pickle.loads((run.folder(22) / "rank-00000.pickle").read_bytes())
    acts = [act for device in history["device_traces"] for act in device if act["action"] == "alloc"]
    assert len([act for act in acts if act["size"] == 4 << 20]) == 2
    run.records.close()
