"""The end of a run that was asked to stop: all who are told of it share what is left until its deadline."""

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from made_records import event

from xtrain.records.lines import Event
from xtrain.records.metrics import StepMetrics
from xtrain.runtime.base.process import BEGAN
from xtrain.runtime.base.state import Progress
from xtrain.runtime.loop.agreement import Limits
from xtrain.runtime.loop.alerts import Message, Notifier
from xtrain.runtime.loop.executor import drain, report_end
from xtrain.runtime.observe import stopping as signals
from xtrain.runtime.observe.records import Records, RecordSink
from xtrain.runtime.observe.stopping import StopRequests


class Saver:
    """A save that is being written."""

    def __init__(self, done: list[str]) -> None:
        self.done, self.seconds = done, 0.0

    def drain(self, seconds: float) -> None:
        self.done.append("saved")
        self.seconds = seconds


class Stuck:
    """A writer whose service does not answer any more."""

    name, seconds, local = "W&B", 600.0, False

    def __init__(self, done: list[str]) -> None:
        self.done, self.never = done, threading.Event()

    def begin(self) -> None: ...

    def metric(self, record: StepMetrics) -> None: ...

    def event(self, record: Event) -> None:
        self.done.append(record.event)

    def rest(self, *, must: bool) -> None: ...

    def end(self, exit_code: int) -> None:
        self.done.append("ended")
        self.never.wait()


class Run:
    def __init__(self, folder: Path, deadline: float) -> None:
        self.folder, self.done, self.reports = folder, [], []
        self.records = Records.open(folder, 0)
        self.requests = StopRequests(deadline_seconds=deadline, report=self.reports.append)
        self.notifier = Notifier(self.records, Progress(step=7), 10)
        self.saver: Any = Saver(self.done)
        self.writer = Stuck(self.done)
        self.records.sinks.append(RecordSink(self.writer, lambda message: self._warn(message)))

    def _warn(self, message: str) -> None:
        self.records.warn(message, step=7)

    def end(self) -> None:
        report_end(self.records, self.requests, self.notifier, self.saver, exit_code=75, failed=False)
        self.records.event(event("run_end", 7, status="stopped"))
        drain(self.records, self.requests, self.saver)
        self.requests.rest()

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "events.jsonl").read_text().splitlines()]


@pytest.fixture
def ended(monkeypatch) -> list[int]:
    codes: list[int] = []
    monkeypatch.setattr(signals.os, "_exit", codes.append)
    return codes


def test_a_command_and_a_writer_that_hang_do_not_cost_a_run_its_end(tmp_path, ended):
    run = Run(tmp_path, deadline=5.0)
    run.requests.hurry("sigterm")
    message = Message(kind="sigterm", text="the run stops", step=7)
    run.notifier.start(f"echo $$ > {tmp_path}/pid; sleep 600", 30.0, message, pause=0.0)
    run.end()
    assert ended == [] and run.reports == []
    # The save first; then commands, whose end the writer is told of; the writer last.
    assert [each for each in run.done if each != "warning"] == ["saved", "notify", "ended", "saved"]
    (notified,) = (each for each in run.events() if each["event"] == "notify")
    assert notified["exit_code"] is None and notified["detail"] == "was ended with the run"
    assert not Path(f"/proc/{int((tmp_path / 'pid').read_text())}").exists()
    assert "abandoned" in run.events()[-2]["message"] and run.events()[-1]["event"] == "run_end"
    run.writer.never.set()


def test_a_save_gets_all_there_is(tmp_path, ended):
    run = Run(tmp_path, deadline=100.0)
    run.writer.never.set()
    run.end()
    assert run.saver.seconds == 100.0  # nobody has asked it to stop
    run.requests.hurry("sigterm")
    assert 0 < run.requests.left(0.2) <= 80 < run.requests.left() <= 100
    run.requests.rest()


@pytest.mark.parametrize(("answered", "what"), [(False, "killed without saving"), (True, "were done, and was killed")])
def test_what_is_said_of_a_rank_that_does_not_leave(ended, answered, what):
    reports: list[str] = []
    over = threading.Event()
    requests = StopRequests(deadline_seconds=0.05, report=lambda message: (reports.append(message), over.set()))
    if answered:
        requests.answered = True
    requests.hurry("sigterm")
    assert over.wait(30)
    assert "did not exit within 0.05 s" in reports[0] and what in reports[0]
    requests._watchdog.join(30)  # type: ignore[union-attr]
    assert ended == [1]


# A second Ctrl-C ------------------------------------------------------------------------------------------------------

WAITS = """
import hashlib, sys
from xtrain.runtime.observe.stopping import StopRequests
StopRequests(deadline_seconds=300.0, report=print).listen()
print("listens", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # holds the main thread up as a collective does
"""


@pytest.mark.parametrize(("sent", "code"), [(["SIGINT", "SIGINT"], 130), (["SIGTERM", "SIGINT", "SIGTERM"], None)])
def test_a_second_interrupt_ends_a_rank_that_waits_for_another(sent, code):
    """Python's own handlers would not run, and know of two signals as of one."""
    process = subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"listens\n"
        for name in sent:
            process.send_signal(signal.Signals[name])
            time.sleep(0.05)
        if code is not None:
            assert process.wait(30) == code
        else:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.5)
    finally:
        process.kill()
        process.communicate()


# The time limit -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ago", "passed"), [(5.0, 0), (11.0, 1), (None, 0)])
@pytest.mark.parametrize("jump", [-4e7, 0.0, 4e7])
def test_a_clock_that_is_set_changes_no_time_limit(monkeypatch, ago, passed, jump):
    if ago is None:
        monkeypatch.delenv(BEGAN, raising=False)
    else:
        monkeypatch.setenv(BEGAN, str(time.monotonic() - ago))
    now = time.time() + jump
    monkeypatch.setattr(time, "time", lambda: now)
    assert Limits(10.0, None).passed == passed
