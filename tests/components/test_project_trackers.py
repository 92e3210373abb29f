"""MLflow, Trackio, Comet, SwanLab and Aim: what they are told, by libraries in their place and by themselves."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, call

import pytest
from made_records import event, metrics
from projects import Project

from xtrain.cli.main import main
from xtrain.components.trackers._projects_run import ProjectWriter
from xtrain.dsl.schema.run import TRACKERS
from xtrain.planner.load import plan_from_spec
from xtrain.runtime.observe.records import RecordSink, TrackerContext

NAN = float("nan")
# Tracker → its module, and settings besides those of all.
OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "mlflow": ("mlflow", {"uri": None}),
    "trackio": ("trackio", {"space": None}),
    "comet": ("comet_ml", {"workspace": None, "mode": "offline"}),
    "swanlab": ("swanlab", {"workspace": None, "description": "d", "mode": "offline"}),
    "aim": ("aim", {"repo": None}),
}


@pytest.fixture
def context(tmp_path, monkeypatch) -> TrackerContext:
    monkeypatch.chdir(tmp_path)
    plan = plan_from_spec(tmp_path / Project(tmp_path).spec()).plan
    assert plan is not None
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "spec.xtrain").write_text("x")
    return TrackerContext(directory=directory, step=0, rolled_back=0, plan=plan, warn=print)


def writer(kind: str, context: TrackerContext, **chosen: Any) -> ProjectWriter:
    module = import_module(f"xtrain.components.trackers.{kind}_run")
    made = next(each for name, each in vars(module).items() if name.endswith("Writer") and each is not ProjectWriter)
    given = {"project": "p", "name": None, "tags": ["a"], "folder": kind, **OWN[kind][1], **chosen}
    return made(context=context, chosen=given, name=kind)


def start(one: ProjectWriter, steps: list[int], exit_code: int) -> list[str]:
    """Give a writer records of these steps; return what it warned of."""
    warned: list[str] = []
    sink = RecordSink(one, warned.append)
    sink.begin()
    for step in steps:
        sink.metric(metrics(step, time=1000.0 + step, loss=1 / step, grad_norm=NAN, **{"moe/load/0": [0.5, 0.5]}))
    sink.event(event("generate", steps[-1], samples=[{"prompt": "a", "text": "b"}]))
    sink.event(event("eval", steps[-1], dataset="web"))
    sink.end(exit_code)
    return warned


@pytest.fixture
def library(monkeypatch) -> MagicMock:
    """Stands for every library; a run of MLflow and Aim has an id."""
    stand_in = MagicMock()
    client = stand_in.MlflowClient.return_value
    client.get_experiment_by_name.return_value = None
    client.create_run.return_value.info.run_id = "made"
    stand_in.Run.return_value.hash, stand_in.Run.return_value.tags = "made", []
    names = (module for module, _ in OWN.values())
    for name in (*names, "mlflow.tracking", "mlflow.entities"):
        monkeypatch.setitem(sys.modules, name, stand_in)
    return stand_in


def told(kind: str, library: MagicMock) -> list[Any]:
    """Calls that send numbers and texts, in order."""
    if kind == "mlflow":
        client = library.MlflowClient.return_value
        return [made for made in client.method_calls if made[0] in ("log_text",) or made.kwargs.get("metrics")]
    run = {"comet": library.start, "aim": library.Run}.get(kind, library.init).return_value
    return [made for made in run.method_calls if made[0] in ("log", "track", "log_metrics", "log_text")]


WANTED = {
    "trackio": lambda lib: [call.log({"loss": 0.5}, step=2), call.log({"generate/1": lib.Markdown("ab")}, step=2)],
    "comet": lambda lib: [
        call.log_metrics({"loss": 0.5}, step=2),
        call.log_text("ab", step=2, metadata={"name": "generate/1"}),
    ],
    "swanlab": lambda lib: [call.log({"loss": 0.5}, step=2), call.log({"generate/1": lib.Text("ab")}, step=2)],
    "aim": lambda lib: [call.track(0.5, name="loss", step=2), call.track(lib.Text("ab"), name="generate/1", step=2)],
    "mlflow": lambda lib: [
        call.log_batch("made", metrics=[lib.Metric("loss", 0.5, 1_002_000, 2)]),
        call.log_text("made", "ab", "generate/1-step2.txt"),
    ],
}


@pytest.mark.parametrize("kind", OWN)
def test_numbers_and_samples_are_sent_at_their_step(context, library, kind):
    assert start(writer(kind, context), [2], 0) == []
    assert told(kind, library) == WANTED[kind](library)
    if kind == "mlflow":
        assert library.Metric.call_args_list[0] == call("loss", 0.5, 1_002_000, 2)


@pytest.mark.parametrize("kind", OWN)
def test_a_run_that_goes_on_is_the_same_run(context, library, kind):
    for code in (75, 0, 1):
        assert start(writer(kind, context), [1], code) == []
    if kind == "mlflow":
        client = library.MlflowClient.return_value
        assert client.create_run.call_count == 1 and client.create_run.call_args.kwargs["run_name"] == "tiny run"
        ends = [made.kwargs["status"] for made in client.set_terminated.call_args_list]
        assert ends == ["KILLED", "FINISHED", "FAILED"]
        parameters = {made.args for made in library.Param.call_args_list}
        assert ("optimizer.lr", "0.003") in parameters
        return
    begun = {"comet": library.start, "aim": library.Run}.get(kind, library.init).call_args_list
    if kind == "aim":
        assert [made.kwargs["run_hash"] for made in begun] == [None, "made", "made"]
    elif kind == "comet":
        assert len({made.kwargs["experiment_key"] for made in begun}) == 1
        assert {made.kwargs["mode"] for made in begun} == {"get_or_create"}
    else:
        names = {made.kwargs["name"] for made in begun}
        assert names == {"tiny run"} and {made.kwargs["project"] for made in begun} == {"p"}
    if kind == "swanlab":
        states = [made.kwargs["state"] for made in library.init.return_value.finish.call_args_list]
        assert states == ["aborted", "success", "crashed"]


def test_swanlab_goes_on_online_by_its_id(context, library):
    for _ in range(2):
        assert start(writer("swanlab", context, mode="online", project=None), [1], 75) == []
    first, second = (made.kwargs for made in library.init.call_args_list)
    assert first["id"] == second["id"] and first["resume"] == "allow" and first["project"] == "tiny"


def test_a_library_that_fails_is_reported_once(context, library):
    library.init.side_effect = RuntimeError("no TTY is available")
    (message,) = start(writer("swanlab", context), [1, 2], 0)
    assert message == "swanlab gets no more records: no TTY is available; metrics.jsonl is complete"


@pytest.mark.parametrize("kind", OWN)
def test_a_plan_has_the_tracker(tmp_path, monkeypatch, capsys, kind):
    monkeypatch.chdir(tmp_path)
    plain = plan_from_spec(tmp_path / Project(tmp_path).spec()).plan
    plan = plan_from_spec(tmp_path / Project(tmp_path).spec(more=f'log {{ {kind} {{ project = "p" }} }}')).plan
    assert plan is not None and plain is not None and plan.config_id == plain.config_id
    node = plan.node(f"setup.log.{kind}")
    assert node.args["project"] == "p" and TRACKERS[kind].title in node.does
    wrong = Project(tmp_path).spec(more=f'log {{ {kind} {{ name = " " }} }}')
    assert main(["check", str(tmp_path / wrong)]) == 2
    assert "X622" in "".join(capsys.readouterr())


@pytest.mark.slow
@pytest.mark.parametrize("kind", OWN)
def test_the_library_itself_takes_two_starts(context, kind, tmp_path):
    pytest.importorskip(OWN[kind][0])
    assert start(writer(kind, context), [1, 2, 3], 75) == []
    assert start(writer(kind, context), [3, 4], 0) == []
    if kind == "mlflow":
        from mlflow.tracking import MlflowClient  # type: ignore[import-not-found]

        client = MlflowClient()
        (run,) = client.search_runs([client.get_experiment_by_name("p").experiment_id])
        history = client.get_metric_history(run.info.run_id, "loss")
        assert [(point.step, point.value) for point in history][-2:] == [(3, 1 / 3), (4, 0.25)]
        assert run.info.status == "FINISHED" and run.data.params["optimizer.lr"] == "0.003"
    else:
        assert kind in ("trackio", "aim") or any(Path(tmp_path / "run" / kind).iterdir())
