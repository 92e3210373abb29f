"""What a rank says that does not come so far as to run, and which signals it hears."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from xtrain.plan.serialise import dumps
from xtrain.planner.load import plan_from_spec
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.locks import WORKER_LOCK, hold
from xtrain.runtime.base.process import write_cause
from xtrain.runtime.loop.worker import run_rank
from xtrain.runtime.observe.provenance import planned
from xtrain.runtime.observe.stopping import EVENTS, stop_signals

ROOT = Path(__file__).parents[3]


@pytest.fixture
def handlers():
    before = {number: signal.getsignal(number) for number in EVENTS}
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_directory_that_another_process_has_locked_is_reported_as_such(tmp_path, handlers):
    """An exception that nobody reports would leave the launcher with ranks that it has ended itself."""
    plan = plan_from_spec(ROOT / "specs/quickstart.xtrain", ()).plan
    assert plan is not None
    lock = hold(tmp_path, WORKER_LOCK)
    assert run_rank(plan, tmp_path) == "environment"
    lock.close()
    (said,) = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert (said["event"], said["code"], said["exit_code"]) == ("failure", "X707", 3)


def test_a_terminal_that_is_closed_stops_nothing_under_nohup(handlers):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    assert set(stop_signals()) == set(EVENTS)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert set(EVENTS) - set(stop_signals()) == {signal.SIGHUP}


def test_a_signal_before_training_is_answered_although_the_main_thread_runs_no_python(tmp_path):
    script = (
        "import os, signal, subprocess, sys, time\n"
        "from xtrain.runtime.observe.stopping import answer_at_once\n"
        "answer_at_once(lambda number: os._exit(100 + number))\n"
        "subprocess.Popen(['sh', '-c', f'sleep 0.3; kill -TERM {os.getpid()}'])\n"
        "import ctypes\n"
        "libc = ctypes.CDLL(None)\n"
        "while True:\n"
        "    libc.pause()\n"  # comes back from no handler that Python has
    )
    done = subprocess.run([sys.executable, "-c", script], timeout=30, cwd=tmp_path)
    assert done.returncode == 100 + signal.SIGTERM


def test_a_plan_that_is_not_the_one_of_this_start_is_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr("xtrain.runtime.observe.provenance.PATIENCE", 0.1)
    plan = plan_from_spec(ROOT / "specs/two_ranks_cpu.xtrain", ()).plan
    assert plan is not None
    for text in (None, "{", dumps(plan)):  # nothing yet, half of it, that of an earlier start
        if text is not None:
            (tmp_path / "plan.json").write_text(text)
        with pytest.raises(EnvironmentFault, match="does not contain the plan of this start"):
            planned(tmp_path, "1234")
    assert planned(tmp_path, plan.id) == plan


def test_the_cause_is_left_where_torchrun_looks_for_it(tmp_path, monkeypatch):
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    files = [tmp_path / "0.json", tmp_path / "1.json"]
    for file, first in zip(files, (True, False), strict=True):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        write_cause("error[X705]: it\ndoes not fit", of_first=not first)
    failures = {rank: ProcessFailure(rank, os.getpid(), 3, str(file)) for rank, file in reversed([*enumerate(files)])}
    text = str(ChildFailedError("xtrain", failures))
    assert text.rstrip("=\n ").endswith("traceback : error[X705]: it\n  does not fit")
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    write_cause("nobody looks")
