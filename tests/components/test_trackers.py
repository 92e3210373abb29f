"""Trackers that xtrain does not have itself: what an installed package offers takes part in a run like its own."""

import json
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import other_packages
import pytest
from projects import Project, curve, events, records

from xtrain.dsl.load import load_spec
from xtrain.dsl.schema.component import Registry
from xtrain.dsl.schema.run import TRACKERS
from xtrain.dsl.spec_text import spec_json
from xtrain.planner.load import plan_from_spec
from xtrain.planner.review.page import render
from xtrain.planner.review.resumable import resumable
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.packages import check_packages
from xtrain.runtime.loop.executor import Executor
from xtrain.runtime.loop.preflight import check_machine

EVAL = "every 2 steps eval lines { batches = 1 }"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    with other_packages.installed(monkeypatch):
        yield


def planned(tmp_path: Path, more: str, steps: int = 4):
    found = plan_from_spec(tmp_path / Project(tmp_path).spec(steps=steps, more=more))
    assert found.plan is not None, found.diagnostics.render()
    return found.plan


def run(tmp_path: Path, more: str, expect: str = "done") -> Path:
    assert Executor(planned(tmp_path, more), tmp_path / "run", rank=0).run() == expect
    return tmp_path / "run"


def calls(directory: Path, kind: str = "") -> list[Any]:
    lines = map(json.loads, (directory / "tally.jsonl").read_text().splitlines())
    return [record for call, record in lines if not kind or call == kind]


def test_a_plan_names_a_tracker_that_is_chosen_and_no_other(tmp_path):
    plain, chosen = planned(tmp_path, ""), planned(tmp_path, "log { tally {} }")
    node = chosen.node("setup.log.tally")
    assert (node.op, node.args) == ("setup.log.tally", {"file": "tally.jsonl"})
    assert node.does == "the first rank notes what it records in tally.jsonl, during training"
    assert "also to the tally in tally.jsonl" in render(chosen) and "tally" not in render(plain)
    assert "tally" not in str(plain) and chosen.config_id == plain.config_id
    both = planned(tmp_path, 'log { tensorboard = true, tally { file = "t" } }')
    assert "the tally in t" in render(both) and "TensorBoard in tensorboard/" in render(both)
    for before, after in ((plain, chosen), (chosen, plain), (chosen, both)):
        verdict = resumable(before, after)
        assert (verdict.kind, verdict.effect) == ("safe", "none")
        assert "log.tally" in {reason.path for reason in verdict.reasons}


def test_plans_are_what_they_were_before_it_was_installed(tmp_path):
    there = planned(tmp_path, "")
    TRACKERS._own.pop("tally")
    assert planned(tmp_path, "").id == there.id


@pytest.mark.parametrize("block", ["tally {}", 'tally { file = "t" }', ""])
def test_a_spec_with_it_is_written_out_and_read_back(tmp_path, block):
    loaded = load_spec(tmp_path / Project(tmp_path).spec(more=f"log {{ {block} }}" if block else ""))
    (tmp_path / "again.xtrain").write_text(loaded.resolved_text())
    again = load_spec(tmp_path / "again.xtrain")
    assert not again.diagnostics and again.spec == loaded.spec
    assert ("tally" in spec_json(loaded.require())["log"]) == bool(block)


@pytest.mark.parametrize(("text", "code", "message"), [
    ("log { taly {} }", "X203", "did you mean `tally`?"),
    ("log { tally = true }", "X210", "`tally` is a block"),
    ("log { tally { fil = 1 } }", "X203", "did you mean `file`?"),
    ("log { tally { file = 1 } }", "X301", "`file` must be a string"),
])  # fmt: skip
def test_its_settings_are_checked_as_those_of_any_block(tmp_path, text, code, message):
    found = load_spec(tmp_path / Project(tmp_path).spec(more=text)).diagnostics
    assert [each.code for each in found] == [code] and message in found.render()


def test_it_gets_exactly_what_the_run_records_and_knows_where_a_resumed_run_goes_on(tmp_path):
    more = f"log {{ tally {{}} }}\n{EVAL}\nlaunch {{ %s }}"
    directory = run(tmp_path, more % "stop_after = 3 steps", expect="stopped")
    assert [call["step"] for call in calls(directory, "begin")] == [0]
    directory = run(tmp_path, more % "")
    assert [call["step"] for call in calls(directory, "begin")] == [0, 3]
    assert calls(directory, "metric") == records(directory, "metrics")
    assert [call["step"] for call in calls(directory, "metric")] == [1, 2, 3, 4]
    recorded, begun = [], False
    for event in records(directory, "events"):
        begun = begun or (event["event"], event.get("node")) == ("setup", "setup.log.tally")
        begun = begun and event["event"] != "run_end"  # of which it knows by the exit code
        recorded += [event] if begun else []
    assert calls(directory, "event") == recorded
    assert {"eval", "checkpoint"} <= {event["event"] for event in recorded}
    assert [call["exit_code"] for call in calls(directory, "end")] == [75, 0]


@pytest.mark.parametrize("fails", ["metric", "end"])
def test_a_failure_of_it_is_one_warning_and_the_run_goes_on(tmp_path, monkeypatch, fails):
    import theirs_run  # pyright: ignore[reportMissingImports]

    def fail(*_: Any) -> None:
        raise RuntimeError("no room\nat all")

    monkeypatch.setattr(theirs_run.TallyWriter, fails, fail)
    directory = run(tmp_path, "log { tally {} }")
    messages = [event["message"] for event in events(directory, "warning")]
    assert messages == ["the tally gets no more records: no room; metrics.jsonl is complete"]
    assert [step for step, *_ in curve(directory)] == [1, 2, 3, 4]


def test_a_tracker_that_cannot_be_made_is_one_warning_too(tmp_path, monkeypatch):
    import theirs_run  # pyright: ignore[reportMissingImports]

    monkeypatch.setattr(theirs_run, "TallyWriter", lambda **_: 1 / 0)
    directory = run(tmp_path, "log { tally {} }")
    (message,) = [event["message"] for event in events(directory, "warning")]
    assert message == "a tracker gets no records: ZeroDivisionError: division by zero; metrics.jsonl is complete"


def test_a_package_whose_module_cannot_be_imported_is_reported_before_anything_is_begun(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Registry, "_offers", "a-broken-package")
        broken = types.new_class("Broken", (TRACKERS["tally"],), exec_body=lambda body: body.update(kind="broken"))
        broken.__module__ = "broken_package"
        TRACKERS.register()(broken)
    (tmp_path / "broken_package_run.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(tmp_path)
    plan = planned(tmp_path, "log { broken {} }")
    monkeypatch.setattr("xtrain.runtime.loop.preflight.find_devices", lambda *_: pytest.fail("devices were touched"))
    with pytest.raises(EnvironmentFault) as raised:
        check_machine(plan, 1)
    assert (raised.value.code, str(raised.value)) == (
        "X715",
        "the tracker broken of the package a-broken-package cannot run: its module broken_package_run cannot be "
        "imported (ModuleNotFoundError: No module named 'no_such_module'); update the package, or choose another "
        "tracker",
    )
    check_packages(planned(tmp_path, "log { tally {} }"))


PARTS = """
import json

from xtrain import TrackerContext, tracker


@tracker
class Notes:
    def open(self, context: TrackerContext, file: str, fails: bool = False):
        self.file, self.fails = (context.directory / file).open("a"), fails
        self.note("begin", {"step": context.step, "lr": context.settings["optimizer"]["lr"]})

    def metrics(self, record):
        if self.fails:
            raise ValueError("no room")
        self.note("metric", record)

    def event(self, record):
        self.note("event", record)

    def close(self, exit_code):
        self.note("end", {"exit_code": exit_code})
        self.file.close()

    def note(self, call, record):
        print(json.dumps([call, record]), file=self.file)
"""


def test_a_class_of_the_users_own_gets_the_same(tmp_path):
    (tmp_path / "parts.py").write_text(PARTS)
    more = 'use "parts.py"\nlog { tally {}, Notes { file = "notes.jsonl" } }\nlaunch { %s }'
    run(tmp_path, more % "stop_after = 3 steps", expect="stopped")
    directory = run(tmp_path, more % "")
    own = list(map(json.loads, (directory / "notes.jsonl").read_text().splitlines()))
    assert [call for kind, call in own if kind == "begin"] == [{"step": 0, "lr": 3e-3}, {"step": 3, "lr": 3e-3}]
    assert [call for kind, call in own if kind == "metric"] == records(directory, "metrics")
    assert [call for kind, call in own if kind == "end"] == [{"exit_code": 75}, {"exit_code": 0}]
    theirs, mine = calls(directory, "event"), [call for kind, call in own if kind == "event"]
    # The one that begins first hears of the other.
    assert [event for event in theirs if event in mine] == mine
    assert {event.get("node") for event in theirs if event not in mine} == {"setup.log.tally", "setup.log.Notes"}


def test_what_a_class_of_the_users_own_raises_is_one_warning_with_its_line(tmp_path):
    (tmp_path / "parts.py").write_text(PARTS)
    directory = run(tmp_path, 'use "parts.py"\nlog { Notes { file = "n", fails = true } }')
    (message,) = [event["message"] for event in events(directory, "warning")]
    line = PARTS.splitlines().index('            raise ValueError("no room")') + 1
    assert message.startswith("`Notes` gets no more records: ") and f"parts.py:{line}: " in message
    assert "ValueError: no room" in message and [step for step, *_ in curve(directory)] == [1, 2, 3, 4]


def test_the_reference_says_who_offers_it(monkeypatch):
    """In a process that has the package as pip installs it, with its entry point."""
    monkeypatch.setenv("PYTHONPATH", str(other_packages.OTHER_PACKAGE))
    shown = subprocess.run([sys.executable, "-m", "xtrain", "docs", "log"], capture_output=True, text=True).stdout
    assert "theirs  tally" in shown and "xtrain  aim, comet, mlflow, swanlab, tensorboard, trackio, wandb" in shown
    assert "log.tally    what a run records" in shown
    assert TRACKERS.origin("wandb") == Registry._offers == "xtrain"
