"""Event files of TensorBoard, read as TensorBoard reads them."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from made_records import event, metrics
from projects import Project, curve, events, records
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from xtrain.components.trackers.tensorboard_run import TensorBoardWriter
from xtrain.plan import hardware as installed_packages
from xtrain.planner.load import plan_from_spec
from xtrain.records.metrics import StepMetrics
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.loop.executor import Executor
from xtrain.runtime.loop.preflight import check_machine
from xtrain.runtime.observe.records import RecordSink


def read(folder: Path) -> EventAccumulator:
    everything = {"scalars": 0, "histograms": 0, "tensors": 0}
    return EventAccumulator(str(folder), size_guidance=everything).Reload()


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(folder).Scalars(tag)]


def text(folder: Path, tag: str) -> str:
    return read(folder).Tensors(f"{tag}/text_summary")[-1].tensor_proto.string_val[0].decode()


def begun(folder: Path, step: int) -> RecordSink:
    sink = RecordSink(TensorBoardWriter(folder=folder, step=step, texts={"spec": lambda: "a = 1\n`b`"}), print)
    sink.begin()
    return sink


def at(step: int, **values) -> StepMetrics:
    return metrics(step, time=1000.0 + step, **values)


def test_numbers_lists_and_texts_are_read_back(tmp_path):
    sink = begun(tmp_path, 0)
    load = [0.5, 0.25, 0.125, 0.125]
    sink.metric(at(1, **{"loss": 2.5, "loss/web": 2.0, "phase": "train", "tokens": 2**40, "moe/load/3": load}))
    sink.metric(at(2, **{"loss": float("nan"), "eval/web/loss": 1.5}))
    sink.event(event("generate", 2, samples=[{"prompt": "def ", "text": "f(x):\n  return"}]))
    sink.end(0)
    found = read(tmp_path)
    assert set(found.Tags()["scalars"]) == {"loss", "loss/web", "tokens", "eval/web/loss"}
    assert scalars(tmp_path, "eval/web/loss") == [(2, 1.5)]
    assert scalars(tmp_path, "tokens") == [(1, 2.0**40)]
    assert found.Scalars("loss")[0].wall_time == 1001.0 and np.isnan(found.Scalars("loss")[1].value)
    (bars,) = found.Histograms("moe/load/3")
    assert bars.histogram_value.bucket == load and bars.histogram_value.bucket_limit == [1, 2, 3, 4]
    assert text(tmp_path, "spec") == "    a = 1\n    `b`"
    assert text(tmp_path, "generate/1") == "    def f(x):\n      return"


def test_steps_that_are_rolled_back_vanish(tmp_path):
    sink = begun(tmp_path, 0)
    for step in range(1, 7):
        sink.metric(at(step, loss=float(step)))
    sink.event(event("rollback", 4, from_step=6))
    sink.metric(at(5, loss=50.0))
    sink.settle()  # as before a checkpoint; then the process is killed
    again = begun(tmp_path, 3)
    for step in (4, 5):
        again.metric(at(step, loss=100.0 + step))
    again.end(0)
    assert scalars(tmp_path, "loss") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 104.0), (5, 105.0)]


def test_a_run_that_is_stopped_and_gone_on_with_has_each_step_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    more = """log { tensorboard = true }
    every 2 steps eval lines { batches = 1 }
    on finish generate { prompts = ["line"], tokens = 2 }"""
    spec = tmp_path / Project(tmp_path).spec(steps=6, more=more)
    directory = tmp_path / "run"
    for stop in ("stop_after = 3 steps", ""):
        spec_text = spec.read_text().split("\nlaunch")[0]
        spec.write_text(f"{spec_text}\nlaunch {{ {stop} }}\n")
        plan = plan_from_spec(spec).plan
        assert plan is not None
        assert Executor(plan, directory, rank=0).run() == ("stopped" if stop else "done")
    assert events(directory, "warning") == []
    folder = directory / "tensorboard"
    assert scalars(folder, "loss") == [(step, np.float32(loss)) for step, loss, _ in curve(directory)]
    assert [step for step, _ in scalars(folder, "loss")] == list(range(1, 7))
    evals = {
        r["step"]: np.float32(r["eval/lines/loss"]) for r in records(directory, "metrics") if "eval/lines/loss" in r
    }
    assert dict(scalars(folder, "eval/lines/loss")) == evals and set(evals) == {2, 4, 6}
    numbers = {k for r in records(directory, "metrics") for k, v in r.items() if isinstance(v, int | float)}
    assert numbers - {"step", "time"} == set(read(folder).Tags()["scalars"])
    assert "experiment tiny" in text(folder, "spec") and "MODEL" in text(folder, "plan")
    assert text(folder, "generate/1").startswith("    line")
    times = [record["time"] for record in map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())]
    assert all(before <= after for before, after in pairwise(times))


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_missing_package_is_reported_before_anything_is_begun(tmp_path, monkeypatch, package: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wandb").mkdir()  # which W&B leaves where it was run, and is no package
    find = installed_packages.find_spec
    monkeypatch.setattr(installed_packages, "find_spec", lambda name: None if name == package else find(name))
    block = {"tensorboard": "tensorboard = true", "wandb": 'wandb { project = "p" }'}[package]
    plan = plan_from_spec(tmp_path / Project(tmp_path).spec(more=f"log {{ {block} }}")).plan
    assert plan is not None
    monkeypatch.setattr("xtrain.runtime.loop.preflight.find_devices", lambda *_: pytest.fail("devices were touched"))
    with pytest.raises(
        EnvironmentFault, match=rf"needs the package {package}.*pip install 'xtrain\[{package}\]'"
    ) as raised:
        check_machine(plan, 1)
    assert raised.value.code == "X715"


def test_a_folder_is_no_package(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "only_a_folder").mkdir()
    assert not installed_packages.is_installed("only_a_folder")
    assert installed_packages.is_installed("json")
