"""What is found is told once, by the first rank, from any thread, and whether or not a disk takes it."""

import json
import os
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from xtrain.plan.serialise import to_json
from xtrain.planner.load import plan_from_spec
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.state import Progress
from xtrain.runtime.loop.alerts import AlertActions, AlertMonitor, planned_bytes
from xtrain.runtime.loop.alerts import alerts as setup_alerts
from xtrain.runtime.nn.batch import Step
from xtrain.runtime.observe.detectors import (
    DiskDetector,
    Finding,
    LossSpikeDetector,
    MemoryDetector,
    SlowDetector,
    StarvationDetector,
)
from xtrain.runtime.observe.records import Records
from xtrain.tui.model.planned import planned
from xtrain.tui.pages.rank_figures import planned_memory

Node = namedtuple("Node", "op args")
Triggered = namedtuple("Triggered", "event nodes stop")
GIB = 2**30
SPECS = Path(__file__).parents[3] / "specs"


class Plan:
    """Of a plan what alerts look at: one command on a spike, and a save."""

    class timeline:
        triggers = (Triggered("loss_spike", ("tell", "save"), False), Triggered("disk", ("tell",), True))

    def node(self, name: str) -> Node:
        return Node("tick.notify", {"command": "page", "limit_seconds": 3.0}) if name == "tell" else Node("save", {})


class RecordingNotifier:
    """Stands in for the notifier."""

    def __init__(self) -> None:
        self.commands: list[Any] = []

    def alert(self, commands: list[tuple[str, float]], finding: Finding, step: int) -> None:
        self.commands += [(command, finding.kind, step) for command, _ in commands]


@pytest.fixture
def alerts(tmp_path) -> AlertMonitor:
    plan: Any = Plan()
    notifier: Any = RecordingNotifier()
    alert_actions = AlertActions(plan.timeline.triggers)
    records = Records.open(tmp_path, 0)
    return AlertMonitor(
        records=records, progress=Progress(step=9), notifier=notifier, alert_actions=alert_actions, plan=plan
    )


@pytest.mark.parametrize("first", [True, False])
def test_the_first_rank_alone_looks_at_numbers_of_all_ranks(tmp_path, first):
    """Each rank looks for others that have stalled, as the first one may be the one that has."""
    records, rank = (
        Records.open(tmp_path, 0 if first else 1),
        SimpleNamespace(is_first=first, device=torch.device("cpu"), replica=None, world_size=2),
    )
    poller, watch, notifier = SimpleNamespace(looks={}), SimpleNamespace(observers=[]), RecordingNotifier()
    found = setup_alerts(
        plan=Plan(), rank=rank, records=records, progress=Progress(step=9), poller=poller, watch=watch,
        notifier=notifier, alert_actions=AlertActions(Plan.timeline.triggers), window=10, loss_spike=6.0, slow=2.0,
        starvation=0.3, memory=1.05, disk_share=0.05, disk_most_bytes=None, disk_bytes=None, checkpoint_bytes=None,
        stalled_seconds=60.0,
    )  # fmt: skip
    detectors = (found.loss_spike, found.slow, found.starvation, found.disk)
    assert [each is not None for each in detectors] == [first] * 4 and list(poller.looks) == ["free space"] * first
    assert len(watch.observers) == 1
    found.report(Finding("loss_spike", "raised", "high"))
    found.report(Finding("disk", "raised", "full"), every_rank=True)
    assert [kind for _, kind, _ in notifier.commands] == (["loss_spike"] if first else []) + ["disk"]


def alert_events(alerts: AlertMonitor) -> list[tuple[Any, ...]]:
    alerts.records.close()
    path = alerts.records.directory / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(each["kind"], each["state"], each["step"]) for each in map(json.loads, lines)]


def waiting(alerts: AlertMonitor) -> int:
    return int(alerts.alert_actions._take())


def steps(alerts: AlertMonitor, losses: list[float], seconds: float = 1.0) -> None:
    for index, loss in enumerate(losses):
        alerts.step_done(Step(index=index, loss=loss, phase="train"), seconds)


def test_a_spike_is_written_notified_and_agreed_upon(alerts):
    alerts.loss_spike = LossSpikeDetector(6.0, 100)
    steps(alerts, [2.0 + 0.01 * (number % 3) for number in range(60)])
    assert alert_events(alerts) == [] and waiting(alerts) == 0
    steps(alerts, [9.0, 9.0])
    assert alert_events(alerts) == [("loss_spike", "raised", 10)], "of the step under way, which is not counted yet"
    assert alerts.notifier.commands == [("page", "loss_spike", 10)]  # type: ignore[attr-defined]
    assert waiting(alerts) == 1 and waiting(alerts) == 0


def test_a_spike_is_one_of_what_is_minimised(alerts):
    """Rejected answers get less and less likely, and so their cross-entropy larger."""
    alerts.loss_spike = LossSpikeDetector(6.0, 100)
    losses = [(2.0 + 0.01 * (number % 3), 0.7) for number in range(60)] + [(9.0, 0.6), (9.0, 0.6), (9.0, 5.0)]
    found = []
    for index, (loss, objective) in enumerate(losses):
        alerts.step_done(Step(index=index, loss=loss, objective=objective, phase="train"), 1.0)
        found.append(waiting(alerts))
    assert found == [0] * 62 + [1]


def test_bad_steps_are_reported_once_and_so_is_their_end(alerts):
    for _ in range(3):
        alerts.bad_step(float("nan"), 1.0)
    steps(alerts, [2.0, 2.0])
    assert alert_events(alerts) == [("nonfinite", "raised", 10), ("nonfinite", "cleared", 10)]


def test_numbers_of_a_log_line(alerts):
    alerts.starvation, alerts.memory = StarvationDetector(0.3), MemoryDetector(1.05)
    for _ in range(3):
        alerts.logged(30, 30.0, 20.0, 1.5)
    assert alert_events(alerts) == [("memory", "raised", 9), ("starvation", "raised", 9)]


def test_what_is_off_is_not_looked_at(alerts):
    steps(alerts, [2.0] * 60 + [9.0] * 9, seconds=1.0)
    alerts.logged(30, 30.0, 30.0, 9.0)
    alerts.look_at_disk()
    assert alert_events(alerts) == []


def test_the_disk_is_asked_now_and_then(alerts, monkeypatch):
    asked: list[Path] = []
    space = os.statvfs(alerts.records.directory)

    def full(path: Path) -> Any:
        asked.append(path)
        values = {"f_bavail": 1, "f_blocks": 100, "f_frsize": GIB}
        return namedtuple("Space", values)(**values)

    monkeypatch.setattr("xtrain.runtime.loop.alerts.os.statvfs", full)
    alerts.disk = DiskDetector(0.05, None, None)
    alerts.look_at_disk()
    alerts.look_at_disk()
    assert asked == [alerts.records.directory] and space.f_blocks
    assert alert_events(alerts) == [("disk", "raised", 9)] and waiting(alerts) == 2


def test_a_disk_that_takes_no_record_of_it_does_not_matter(alerts, monkeypatch):
    def full(*given: Any, **rest: Any) -> None:
        raise EnvironmentFault("X706", "full")

    monkeypatch.setattr(Records, "event", full)
    alerts.report(Finding("disk", "raised", "full"))
    assert alerts.notifier.commands == [("page", "disk", 9)]  # type: ignore[attr-defined]


def test_slow_steps(alerts):
    alerts.slow = SlowDetector(2.0, 100)
    steps(alerts, [2.0] * 60, seconds=1.0)
    steps(alerts, [2.0] * 6, seconds=5.0)
    assert alert_events(alerts) == [("slow", "raised", 10)]


def test_other_ranks_report_nothing_but_what_only_they_can(tmp_path, alerts):
    other = AlertMonitor(
        records=Records.open(tmp_path / "other", 1), progress=Progress(), notifier=alerts.notifier,
        alert_actions=alerts.alert_actions, plan=alerts.plan,
    )  # fmt: skip
    other.bad_step(float("nan"), 1.0)
    assert alert_events(other) == []
    other.report(Finding("stalled", "raised", "rank 0 is gone", ranks=(0,)), every_rank=True)
    assert alert_events(other) == [("stalled", "raised", 0)]


def test_alerts_and_screens_compare_a_rank_with_what_is_planned_for_its_own_stage():
    plan = plan_from_spec(str(SPECS / "llama_405b_16k.xtrain")).plan
    assert plan is not None
    read = planned(to_json(plan))
    assert read is not None
    shown, several = planned_memory(read, "cuda"), set()
    for each in plan.estimates.classes:
        rank: Any = namedtuple("Rank", "coordinates")({"pp": each.pp})
        size = planned_bytes(plan, rank)
        several.add(size)
        assert each.memory.reserve > 0 and size == each.memory.total_bytes - each.memory.reserve
        assert shown[each.pp] == size and read.classes[each.pp].allocated_bytes == size
    assert len(several) > 1 and read.memory_bytes == max(several)
