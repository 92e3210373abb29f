"""Commands that are told of what happens: in which environment, for how long, how often, and what harms nobody."""

import errno
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.state import Progress
from xtrain.runtime.loop import alerts as notify
from xtrain.runtime.loop.alerts import Message, Notifier
from xtrain.runtime.observe.detectors import Finding
from xtrain.runtime.observe.records import Records

SPIKE = Finding("loss_spike", "raised", "loss 9 lies 40 deviations above", 9.0, 3.5, (1, 3))
OF_A_RANK = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1", "GROUP_RANK": "0",
    "TORCHELASTIC_RUN_ID": "x", "XTRAIN_BEGAN": "0", "ROLE_NAME": "default",
}  # fmt: skip


class Desk:
    """A notifier over a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.records = folder / "run", Records.open(folder / "run", 0)
        environment = {"PATH": os.environ["PATH"], "HOME": "/home/me", **OF_A_RANK}
        self.notifier = Notifier(self.records, Progress(step=7), 10, environment)

    def tell(self, command: str, finding: Finding = SPIKE, seconds: float = 20.0) -> None:
        self.notifier.alert([(command, seconds)], finding, 7)

    def events(self, event: str) -> list[dict[str, Any]]:
        self.notifier.close()
        self.records.close()
        path = self.folder / "events.jsonl"
        found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [each for each in found if each["event"] == event]

    def log(self) -> str:
        return (self.folder / "logs" / "notify.log").read_text()


@pytest.fixture
def desk(tmp_path):
    return Desk(tmp_path)


def test_a_command_finds_in_its_environment_what_it_is_about_and_is_no_rank(desk):
    desk.tell("env; cat")
    (found,) = desk.events("notify")
    assert (found["kind"], found["command"], found["exit_code"], found["step"]) == ("loss_spike", "env; cat", 0, 7)
    variables = dict(line.split("=", 1) for line in desk.log().splitlines()[1:] if "=" in line)
    assert {name: variables[f"XTRAIN_{name}"] for name in ("ALERT", "STEP", "VALUE", "LIMIT", "RANKS", "RUN")} == {
        "ALERT": "loss_spike", "STEP": "7", "VALUE": "9.0", "LIMIT": "3.5", "RANKS": "1 3", "RUN": "run",
    }  # fmt: skip
    assert variables["XTRAIN_MESSAGE"] == SPIKE.message and variables["XTRAIN_DIRECTORY"] == str(desk.folder)
    assert variables["HOME"] == "/home/me" and not set(variables) & set(OF_A_RANK)


def test_nobody_waits_for_it(desk, tmp_path):
    desk.tell(f"while [ ! -e {tmp_path}/later ]; do sleep 0.02; done")
    (tmp_path / "later").touch()  # had it been waited for, this would come after its limit
    assert desk.events("notify")[0]["exit_code"] == 0


def test_a_command_that_fails_is_a_warning(desk):
    desk.tell("echo went wrong; exit 3")
    (found,) = desk.events("notify")
    assert found["exit_code"] == 3
    (warning,) = desk.events("warning")
    assert "exit code 3" in warning["message"] and "logs/notify.log" in warning["message"]
    assert "went wrong" in desk.log()


def test_a_command_that_lasts_and_does_not_listen_is_ended(desk, monkeypatch):
    monkeypatch.setattr(notify, "GRACE_SECONDS", 0.2)
    desk.tell("trap '' TERM; while :; do sleep 0.05; done", seconds=0.3)
    (found,) = desk.events("notify")
    assert found["exit_code"] is None and "was killed after 0.3 s" in found["detail"]
    assert desk.events("warning")


def test_its_children_go_with_it(desk, tmp_path):
    desk.tell(f"sleep 600 & echo $! > {tmp_path}/child; wait", seconds=0.3)
    desk.events("notify")
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and Path(f"/proc/{child}").exists():
        if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.02)
    else:
        if Path(f"/proc/{child}").exists():
            os.kill(child, signal.SIGKILL)
            pytest.fail("the child lives on")


def test_the_same_is_not_reported_again_and_again(desk, monkeypatch):
    for _ in range(3):
        desk.tell("echo one")
        desk.notifier.close()
    desk.tell("echo two")  # another command
    desk.tell("echo one", Finding("disk", "raised", "full"))  # another alert
    assert sorted((each["kind"], each["command"]) for each in desk.events("notify")) == [
        ("disk", "echo one"), ("loss_spike", "echo one"), ("loss_spike", "echo two"),
    ]  # fmt: skip
    monkeypatch.setattr(notify, "PAUSE_SECONDS", 0.0)
    desk.tell("echo one")
    assert desk.events("notify")[-1]["detail"].endswith("2 before it came too soon and were skipped")


def test_one_of_a_kind_at_a_time(desk, tmp_path):
    command = f"while [ ! -e {tmp_path}/later ]; do sleep 0.02; done"
    for _ in range(4):
        desk.notifier.start(command, 20.0, Message(kind="tick", text="", step=1), pause=0.0)
    (tmp_path / "later").touch()
    assert len(desk.events("notify")) == 1


@pytest.mark.parametrize("kind", ["finish", "sigterm", "nan", "tick"])
def test_other_events_say_how_far_the_run_has_come(desk, kind):
    desk.notifier.trigger(kind, "echo $XTRAIN_ALERT: $XTRAIN_MESSAGE", 20.0, 1.5)
    desk.events("notify")
    assert f"{kind}: " in desk.log() and "step 7 of 10, loss 1.5" in desk.log()


def test_a_disk_that_takes_nothing_keeps_no_command_from_running(desk, tmp_path, monkeypatch):
    def full(*given: Any, **rest: Any) -> None:
        raise EnvironmentFault("X706", os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Records, "event", full)
    desk.folder.mkdir(exist_ok=True)
    (desk.folder / "logs").write_text("a file where the folder would be")
    desk.tell(f"touch {tmp_path}/told")
    desk.notifier.close()
    assert (tmp_path / "told").exists()


def test_values_of_variables_are_in_no_record(tmp_path, desk):
    desk.notifier.hidden, desk.notifier.environment = frozenset({"KEY"}), {"KEY": "SECRET123"}
    desk.notifier.start(f"echo env(KEY) > {tmp_path}/got", 5.0, Message(kind="finish", text="", step=7), pause=0.0)
    desk.notifier.start("echo env(OTHER)", 5.0, Message(kind="nan", text="", step=7), pause=0.0)
    desk.notifier.hidden |= {"GONE"}
    desk.notifier.start("echo env(GONE)", 5.0, Message(kind="slow", text="", step=7), pause=0.0)
    desk.notifier.close()
    assert (tmp_path / "got").read_text() == "SECRET123\n"
    said = str(desk.__dict__) + "".join(path.read_text() for path in desk.notifier.records.directory.rglob("*.log"))
    assert "SECRET123" not in said.replace("'KEY': 'SECRET123'", "") and "env(KEY)" in said
