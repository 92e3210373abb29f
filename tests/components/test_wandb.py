"""What Weights & Biases is told, by a library in its place that notes it: names, rows, ends, and no network."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_records import event, metrics
from projects import Project

from xtrain.components.trackers.wandb_run import WandbWriter
from xtrain.planner.load import plan_from_spec
from xtrain.records.metrics import StepMetrics
from xtrain.runtime.observe.records import RecordSink, TrackerContext


class Library:
    """Stands for the module `wandb`. unreachable: modes in which it cannot begin a run."""

    def __init__(self, *unreachable: str) -> None:
        self.unreachable, self.begun, self.rows, self.saved, self.ended = unreachable, [], [], [], []
        self.axes: list[tuple[str, str]] = []

    def module(self) -> Any:
        names = ("Settings", "Histogram", "Table")
        classes = {name: lambda name=name, **said: (name, said) for name in names}
        return SimpleNamespace(init=self.init, teardown=lambda: self.ended.append("teardown"), **classes)

    def init(self, **said: Any) -> Any:
        if said["mode"] in self.unreachable:
            raise RuntimeError("No API key configured.\nUse `wandb login`.")
        self.begun.append(said)
        return SimpleNamespace(
            define_metric=lambda glob, step_metric: self.axes.append((glob, step_metric)),
            save=lambda path, **_: self.saved.append(Path(path).name),
            log=lambda values, step: self.rows.append((step, values)),
            finish=lambda exit_code: self.ended.append(exit_code),
        )


CHOSEN = {"project": "p", "entity": "team", "name": None, "group": "g", "tags": ["a"], "notes": "why"}


@pytest.fixture
def start(tmp_path, monkeypatch):
    """`start(library)`: a sink to W&B of a run in a directory, and what was warned of."""
    for name in ("CACHE_DIR", "DATA_DIR", "ERROR_REPORTING"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)

    def begin(library: Library, *, mode: str = "online", rolled_back: int = 0) -> tuple[RecordSink, list[str]]:
        monkeypatch.setitem(sys.modules, "wandb", library.module())
        warned: list[str] = []
        (tmp_path / "spec.xtrain").touch()
        config = {"experiment": {"name": "llama"}, "optimizer": {"lr": 1e-3}}
        writer = WandbWriter(
            directory=tmp_path, mode=mode, chosen=CHOSEN, config=config, rolled_back=rolled_back, warn=warned.append
        )
        sink = RecordSink(writer, warned.append)
        sink.begin()
        return sink, warned

    return begin


def at(step: int, **values) -> StepMetrics:
    return metrics(step, time=1000.0 + step, **values)


def test_a_run_is_begun_as_declared_with_its_files_in_its_folder(start, tmp_path):
    library = Library()
    sink, warned = start(library)
    sink.end(0)
    (said,) = library.begun
    wanted = {"project": "p", "entity": "team", "group": "g", "tags": ["a"], "notes": "why", "mode": "online"}
    assert wanted.items() <= said.items() and said["name"] == f"llama {tmp_path.name}"
    assert (said["dir"], said["resume"]) == (str(tmp_path), "allow")
    assert said["config"]["optimizer"] == {"lr": 1e-3}
    assert library.axes == [("*", "step")] and library.saved == ["spec.xtrain"]
    assert library.ended == [0, "teardown"] and warned == []
    folders = [Path(os.environ[f"WANDB_{name}_DIR"]) for name in ("CACHE", "DATA")]
    assert {path.parent for path in folders} == {tmp_path / "wandb"}


def test_a_run_that_goes_on_is_the_same_run_and_another_folder_another(start, tmp_path):
    ids = []
    for _ in range(2):
        library = Library()
        sink, _ = start(library)
        sink.end(75)
        ids.append(library.begun[0]["id"])
        assert library.ended[0] == 0  # stopped, to be gone on with
    assert ids[0] == ids[1] == (tmp_path / "wandb" / "run_id").read_text().strip()
    (tmp_path / "wandb" / "run_id").unlink()
    sink, _ = start(library)
    sink.end(1)
    assert library.begun[-1]["id"] != ids[0] and library.ended[-2] == 1


def test_rows_rise_though_steps_are_rolled_back(start):
    library = Library()
    sink, _ = start(library, rolled_back=10)
    sink.metric(at(1, loss=2.0, phase="train", **{"moe/load/0": [0.75, 0.25], "moe/load/1": [0.1] * 600}))
    sink.metric(at(6, loss=1.0))
    sink.event(event("rollback", 4, from_step=6))
    sink.metric(at(5, loss=0.5))
    sink.event(event("generate", 5, samples=[{"prompt": "a", "text": "b"}]))
    sink.event(event("eval", 5, dataset="web"))
    sink.end(0)
    bars = ("Histogram", {"np_histogram": ([0.75, 0.25], [0, 1, 2])})
    table = ("Table", {"columns": ["prompt", "text"], "data": [["a", "b"]]})
    assert library.rows == [
        (11, {"step": 1, "loss": 2.0, "phase": "train", "moe/load/0": bars}),
        (16, {"step": 6, "loss": 1.0}),
        (17, {"step": 5, "loss": 0.5}),
        (17, {"step": 5, "generate": table}),
    ]


def test_a_run_that_cannot_be_sent_is_kept_offline_and_says_so(start, tmp_path):
    library = Library("online")
    sink, warned = start(library)
    sink.metric(at(1, loss=2.0))
    sink.end(0)
    assert library.ended == ["teardown", 0, "teardown"]
    assert [said["mode"] for said in library.begun] == ["offline"] and library.rows == [(1, {"step": 1, "loss": 2.0})]
    (message,) = warned
    assert (
        "W&B is not available online (No API key configured): records are saved" in message and "wandb sync" in message
    )


def test_a_library_that_does_not_work_at_all_is_reported_once(start):
    library = Library("offline")
    sink, warned = start(library, mode="offline")
    sink.metric(at(1, loss=2.0))
    sink.end(0)
    assert warned == ["W&B gets no more records: No API key configured.; metrics.jsonl is complete"]


def test_the_config_is_the_resolved_spec(tmp_path):
    plan = plan_from_spec(tmp_path / Project(tmp_path).spec(more='log { wandb { project = "p" } }')).plan
    assert plan is not None
    config = TrackerContext(directory=tmp_path, step=0, rolled_back=0, plan=plan, warn=print).settings
    assert config["config_id"] == plan.config_id and config["experiment"]["name"] == "tiny"
    assert config["optimizer"]["lr"] == 3e-3 and config["model"]["kv_heads"] == 2
    assert config["log"]["wandb"]["project"] == "p"
