"""Whether a run is alive: of runs that end, are killed, wait, stand still, or run on another machine."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from live_runs import workers
from made_runs import MadeRun, made_run
from projects import Project

from xtrain.tui.model import life as life_module
from xtrain.tui.model import rank_reader
from xtrain.tui.model.reader import RunReader
from xtrain.tui.pages.rank_figures import states as states_of_ranks

# Holds the locks of a run and writes heartbeats, as its processes do.
STANDIN = """
import fcntl, os, sys, time
sys.path.insert(0, {support!r})
from pathlib import Path
from made_runs import MadeRun
locks = [(Path(sys.argv[1]) / name).open("a") for name in (".launcher.lock", ".worker.lock")]
for lock in locks:
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.utime(lock.fileno(), (0, 0))  # before all records
run = MadeRun(directory=Path(sys.argv[1]), plan={{"world_size": 2}})
print("ready", flush=True)
while True:
    if sys.argv[2] == "beats":
        run.beat()
    time.sleep(0.5)
"""


@pytest.fixture
def standin():
    started: list[subprocess.Popen] = []

    def start(run: MadeRun, beats: str) -> subprocess.Popen:
        script = STANDIN.format(support=str(Path(__file__).parents[2] / "support"))
        command = [sys.executable, "-c", script, str(run.directory), beats]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


class Clock:
    """A clock that a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        for module in (life_module, rank_reader):
            monkeypatch.setattr(module.time, "monotonic", lambda: self.now)

    def polls(self, reader: RunReader, seconds: float, run: MadeRun | None = None, **beats) -> list[str]:
        """The states that are seen in so many seconds, with a line of progress every second."""
        states = []
        for _ in range(round(seconds / 0.5)):
            self.now += 0.5
            if run is not None and self.now % 1 == 0:
                run.beat(**beats)
            states.append(reader.poll().life.state)
        return states


def test_a_run_that_is_killed_is_lost_within_five_seconds(
    tmp_path: Path, standin, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    run = made_run(tmp_path / "run", end="running", logged=8)
    process = standin(run, "beats")
    reader = RunReader(run.directory)
    assert set(clock.polls(reader, 1.5)) == {"training"}
    process.kill()
    process.wait()
    assert clock.polls(reader, 5)[-1] == "lost"
    board = reader.poll()
    assert [alert.kind for alert in board.alerts] == ["lost"] and board.life.over


def test_a_run_that_is_killed_in_set_up_is_lost_too(tmp_path: Path, standin, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank has written a heartbeat yet: there are only the locks."""
    clock = Clock(monkeypatch)
    run = made_run(tmp_path / "run", end="starting")
    process = standin(run, "no beats")
    reader = RunReader(run.directory)
    assert set(clock.polls(reader, 1.5)) == {"starting"}
    process.kill()
    process.wait()
    assert clock.polls(reader, 5)[-1] == "lost"
    assert reader.poll().life.why == "no process holds its lock files"


def test_a_run_that_was_killed_long_ago_is_lost_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made_run(tmp_path / "run", end="killed", logged=8)
    reader = RunReader(run.directory)
    assert Clock(monkeypatch).polls(reader, 3)[-1] == "lost"
    assert reader.poll().life.why == "its processes are gone"


def test_a_run_that_saves_for_long_or_waits_is_not_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    run = made_run(tmp_path / "run", end="running", logged=8)
    reader = RunReader(run.directory)
    with run.alive():
        assert set(clock.polls(reader, 60, run, lasting=True, idle=300.0, node="tick.checkpoint")) == {"training"}
        assert not reader.poll().alerts
        run.event("control", id="1", command="pause", state="accepted", detail="")
        assert reader.poll().life.state == "training"
        run.event("control", id="1", command="pause", state="done", detail="")
        assert set(clock.polls(reader, 20, run)) == {"paused"}
        run.event("paused", seconds=20.0)
        assert set(clock.polls(reader, 2, run)) == {"training"}


def test_a_launcher_between_two_starts_is_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    run = made_run(tmp_path / "run", end="killed", logged=8)
    reader = RunReader(run.directory)
    with run.alive():
        run.event("restart", number=1, of=3, reason="rank 1 was killed by SIGKILL", world=2)
        assert set(clock.polls(reader, 30)) == {"starting"}


def test_a_launcher_of_another_machine_between_two_starts_is_given_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock is not seen here, and the lines of the ranks that have failed stand still."""
    clock = Clock(monkeypatch)
    monkeypatch.setattr(life_module, "is_shared", lambda path: True)
    run = made_run(tmp_path / "run", end="running", logged=8)
    reader = RunReader(run.directory)
    clock.polls(reader, 5, run, host="elsewhere")
    run.event("restart", number=1, of=3, reason="rank 1 was killed by SIGKILL", world=2)
    assert set(clock.polls(reader, 100)) == {"starting"}
    assert clock.polls(reader, 30)[-1] == "lost"


def test_of_a_run_on_another_machine_the_lines_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its locks are not seen here, nor its processes, and its clock is an hour behind."""
    clock = Clock(monkeypatch)
    monkeypatch.setattr(life_module, "is_shared", lambda path: True)
    run = made_run(tmp_path / "run", end="running", logged=8)
    elsewhere = {"host": "elsewhere", "time": time.time() - 3600}
    reader = RunReader(run.directory)
    assert set(clock.polls(reader, 60, run, **elsewhere)) == {"training"}
    states = clock.polls(reader, 7)
    assert states[0] == "training" and states[-1] == "lost"
    assert set(clock.polls(reader, 5, run, **elsewhere)[4:]) == {"training"}, "its network was away"


def test_a_file_system_that_shows_changes_late_makes_no_alarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every six seconds: once it has been seen how long changes take, that is no silence."""
    clock = Clock(monkeypatch)
    monkeypatch.setattr(life_module, "is_shared", lambda path: True)
    run = made_run(tmp_path / "run", end="running", logged=8)
    reader = RunReader(run.directory)
    states = []
    for _ in range(12):
        run.beat(host="elsewhere")
        states += clock.polls(reader, 6)
    assert "lost" in states[:24] and set(states[24:]) == {"training"}


def test_a_copied_directory_has_no_locks_to_look_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    run = made_run(tmp_path / "run", end="starting")
    assert set(clock.polls(RunReader(run.directory), 60)) == {"starting"}


def test_a_run_that_was_killed_before_its_first_word_is_lost(
    tmp_path: Path, standin, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    run = made_run(tmp_path / "run", end="waiting")
    assert set(clock.polls(RunReader(run.directory), 10)) == {"waiting"}  # there is not even a launcher yet
    process = standin(run, "no beats")
    reader = RunReader(run.directory)
    assert set(clock.polls(reader, 10)) == {"waiting"}
    process.kill()
    process.wait()
    assert clock.polls(reader, 5)[-1] == "lost"


def test_a_directory_that_is_removed_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    run = made_run(tmp_path / "run", end="starting")
    reader = RunReader(run.directory)
    clock.polls(reader, 3)
    shutil.rmtree(run.directory)
    assert clock.polls(reader, 3)[-1] == "lost" and reader.poll().life.why == "its directory is gone"


def test_set_up_on_another_machine_is_given_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setattr(life_module, "is_shared", lambda path: True)
    run = made_run(tmp_path / "run", end="starting")
    reader = RunReader(run.directory)
    assert set(clock.polls(reader, 100)) == {"starting"}
    run.event("setup_begin", node="setup.weights")
    assert set(clock.polls(reader, 100)) == {"starting"}
    assert clock.polls(reader, 30)[-1] == "lost"


def test_ranks_without_heartbeats_are_shown_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    run = made_run(tmp_path / "run", "experts", end="running", logged=8)
    reader = RunReader(run.directory)
    ids, messages = set(), []
    wall = [time.time()]
    monkeypatch.setattr("xtrain.tui.model.reader.time.time", lambda: wall[0])
    with run.alive():
        clock.polls(reader, 10, run)
        assert not reader.poll().alerts
        for _ in range(20):
            wall[0] += 1.0
            clock.polls(reader, 1, run, ranks=[0, 1, 3])
            for alert in reader.poll().alerts:
                ids.add(alert.id)
                messages.append((alert.kind, alert.message))
        assert len(ids) == 1 and messages[-1][0] == "silent"
        assert messages[-1][1].startswith("Rank 2 has sent no heartbeat for ")
        assert [each.rank for each in reader.poll().ranks if each.pulse in ("silent", "gone")] == [2]
        clock.polls(reader, 2, run)
        assert not reader.poll().alerts


def test_a_line_that_cannot_be_read_any_more_stands_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    run = made_run(tmp_path / "run", end="running", logged=8)
    reader = RunReader(run.directory)
    with run.alive():
        clock.polls(reader, 3, run)
        (run.directory / "ranks/00001.beat").unlink()
        clock.polls(reader, 8, run, ranks=[0])
        assert [rank.pulse for rank in reader.poll().ranks] == ["alive", "silent"]


def test_ranks_without_progress_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    run = made_run(tmp_path / "run", end="running", logged=8)
    reader = RunReader(run.directory)
    wall = [time.time()]
    monkeypatch.setattr("xtrain.tui.model.reader.time.time", lambda: wall[0])
    with run.alive():
        clock.polls(reader, 5, run, idle=45.0)
        wall[0] += 5
        clock.polls(reader, 2, run, idle=46.0)
        alerts = reader.poll().alerts
        assert [alert.kind for alert in alerts] == ["idle"]
        assert alerts[0].message == "Ranks 0, 1 have made no progress for 46s, in step.forward_backward"
        run.event("alert", kind="stalled", message="no step for 60 s", value=60, limit=60, ranks=[0], state="raised")
        wall[0] += 1
        assert [(a.kind, a.message) for a in reader.poll().alerts] == [("stalled", "no step for 60 s")]
        run.event("alert", kind="stalled", message="", value=1, limit=60, ranks=[], state="cleared")
        clock.polls(reader, 5, run)
        assert not reader.poll().alerts


@pytest.mark.parametrize("end", ["done", "failed", "killed"])
def test_a_run_that_is_started_again_is_starting_before_it_has_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end
) -> None:
    clock = Clock(monkeypatch)
    run = made_run(tmp_path / "run", end=end, logged=8)
    reader = RunReader(run.directory)
    assert clock.polls(reader, 5)[-1] in ("ended", "lost")
    with run.alive(began=time.time()):
        states = clock.polls(reader, 30)
        board = reader.poll()
        assert set(states[2:]) == {"starting"} and not board.life.over
        assert not board.alerts and not board.run.failures and board.run.end is None
        assert states_of_ranks(board).troubled() == []
        run.start = time.time() + 1
        run.begin()  # what it says from here on is its own
        assert set(clock.polls(reader, 2)) == {"training"}


@pytest.mark.parametrize("end", ["done", "stopped", "failed"])
def test_how_a_run_has_ended(tmp_path: Path, end) -> None:
    run = made_run(tmp_path / "run", end=end, logged=8)
    life = RunReader(run.directory).poll().life
    assert (life.state, life.status, life.in_words, life.over) == ("ended", end, end, True)


def test_a_failure_that_nobody_was_left_to_conclude(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made_run(tmp_path / "run", end="killed", logged=8)
    run.event("failure", rank=1, error="RuntimeError: boom", exit_code=1, traceback="", code="")
    reader = RunReader(run.directory)
    assert Clock(monkeypatch).polls(reader, 3)[-1] == "ended"
    assert reader.poll().life.status == "failed" and not reader.poll().alerts


@pytest.mark.slow
def test_a_real_run_that_is_killed(tmp_path: Path) -> None:
    """Its launcher and its ranks at once, during set-up and while it trains."""
    for moment in ("setup", "training"):
        folder = tmp_path / moment
        folder.mkdir()
        project = Project(folder)
        process = subprocess.Popen(
            project.command("run", project.spec(steps=100_000), "--ui", "none"),
            cwd=folder, env=project.environment, start_new_session=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        wanted = "setup_begin" if moment == "setup" else "setup_done"
        deadline = time.monotonic() + 300  # it does not hang
        while not (found := [e for e in folder.glob("runs/tiny/*/events.jsonl") if wanted in e.read_text()]):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        reader = RunReader(found[0].parent)
        assert reader.poll().life.state in ("starting", "training")
        process.send_signal(signal.SIGSTOP)  # so that it writes nothing
        for rank in workers(found[0].parent):
            os.kill(rank, signal.SIGKILL)
        process.kill()
        process.wait()
        deadline = time.monotonic() + 60  # how soon is judged above; here processes need their time to go
        while reader.poll().life.state != "lost":
            assert time.monotonic() < deadline
            time.sleep(0.25)
