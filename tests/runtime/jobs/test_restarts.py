"""When a worker group is started again, on how many ranks, and what is said of it; the ranks themselves are faked."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from xtrain.planner.load import plan_from_path
from xtrain.records.events import events_of
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.process import RESTART, is_restart
from xtrain.runtime.jobs import restarts as restarts_module
from xtrain.runtime.jobs.launch import (
    Ended,
    StopNotes,
    end_leftovers,
    find_failure_cause,
    launch,
    rank_command,
    ranks_of,
)
from xtrain.runtime.jobs.restarts import RestartLoop
from xtrain.runtime.store.run_directory import open_workspace

SPEC = """
experiment tiny {{ seed = 3, budget = 60 steps }}
model qwen3 {{ dim = 32, layers = 2, heads = 4, kv_heads = 2, ffn = 48 }}
tokenizer bytes
dataset lines {{ source = synthetic() }}
batch {{ sequence = 64, rows = 8 }}
optimizer adamw {{ lr = 3e-3 }}
fault_tolerance {{ {settings} }}
"""
KILLED = Ended(failures={1: -9})


def failure(rank: int | None = 0, error: str = "it broke", exit_code: int = 1, **more: object) -> dict:
    return {"event": "failure", "step": 3, "rank": rank, "error": error, "exit_code": exit_code, **more}


DONE = [{"event": "setup_done", "step": 0}, {"event": "run_end", "step": 60, "status": "done", "exit_code": 0}]
BEGUN = [{"event": "setup_done", "step": 0}]


@pytest.fixture
def seen() -> list[dict]:
    """What each worker group was started with."""
    return []


@pytest.fixture
def run(tmp_path, monkeypatch, seen):
    """Run worker groups of which each says and ends as a list tells; gives the exit code and the events."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(restarts_module, "SHORTEST", 0.01)
    monkeypatch.delenv(RESTART, raising=False)

    def start(settings: str, story: list, world: int = 2) -> tuple[int, list[dict]]:
        path = tmp_path / "tiny.xtrain"
        path.write_text(SPEC.format(settings=settings))
        compiled = plan_from_path(path, (), world)
        assert compiled.plan is not None, compiled.diagnostics.render()
        chapters = iter(story)

        def launch(directory: Path, attempt: str, *, ranks: int, stop_seconds: float, notes: StopNotes) -> Ended:
            said, ended = next(chapters)
            seen.append({"ranks": ranks, "attempt": attempt, "restart": is_restart()})
            seen[-1]["plan"] = json.loads((directory / "plan.json").read_text())["id"]
            with (directory / "events.jsonl").open("a") as file:
                file.writelines(json.dumps({"time": 0, **each}) + "\n" for each in said)
            return ended() if callable(ended) else ended

        monkeypatch.setattr(restarts_module, "launch", launch)
        workspace = open_workspace(compiled.plan, compiled.resolved_text)
        code = RestartLoop(plan=compiled.plan, workspace=workspace).run()
        lines = (workspace.directory / "events.jsonl").read_text().splitlines()
        assert next(chapters, None) is None, "fewer worker groups were started than the story has"
        return code, [json.loads(line) for line in lines]

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    yield start
    os.environ.pop(RESTART, None)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def of(events: list[dict], kind: str) -> list[dict]:
    return [event for event in events if event["event"] == kind]


def test_a_worker_group_that_fails_is_started_again_and_the_run_ends_once(run, seen):
    code, events = run("restarts = 2", [(BEGUN, KILLED), (BEGUN, KILLED), (DONE, Ended())])
    assert code == 0
    assert [(e["number"], e["of"], e["reason"], e["world"]) for e in of(events, "restart")] == [
        (1, 2, "rank 1 was killed by SIGKILL", 2),
        (2, 2, "rank 1 was killed by SIGKILL", 2),
    ]
    assert len(of(events, "run_end")) == 1 and not of(events, "failure")
    assert [each["restart"] for each in seen] == [False, True, True]


def test_a_start_of_a_job_that_follows_another_one_is_a_restart(run, seen, monkeypatch):
    """Though the command is a new one: with `resume = false` it would begin anew."""
    monkeypatch.setenv(RESTART, "2")
    code, events = run("restarts = 1", [(BEGUN, KILLED), (DONE, Ended())])
    assert code == 0 and [each["restart"] for each in seen] == [True, True]
    assert [each["number"] for each in of(events, "restart")] == [1]
    assert os.environ[RESTART] == "3"


def test_a_run_whose_restarts_are_used_up_fails_with_a_report_of_all(run):
    code, events = run("restarts = 1", [(BEGUN, KILLED), ([*BEGUN, failure(0, "out of memory")], Ended())])
    assert code == 1
    (end,) = of(events, "run_end")
    assert end["status"] == "failed"
    report = of(events, "failure")[-1]["error"]
    assert "given up after 2 starts" in report and "SIGKILL" in report and "rank 0 failed: out of memory" in report


def test_without_restarts_a_failure_ends_the_run(run):
    code, events = run("restarts = 0", [(BEGUN, KILLED)])
    assert code == 1 and not of(events, "restart")
    assert [e["rank"] for e in of(events, "failure")] == [1]


@pytest.mark.parametrize(
    ("said", "ended", "code"),
    [
        ([failure(exit_code=3, code="X507")], Ended(failures={0: 1}), 3),
        ([], Ended(failures={0: 3, 1: 3}), 3),
        ([failure(None, "step 3: loss nan", agreed=True)], Ended(failures={0: 1, 1: 1}), 1),
        ([*BEGUN, failure(1, "did not stop")], Ended(signal=signal.SIGTERM), 1),
        ([*BEGUN, {"event": "signal", "step": 4, "name": "sigterm"}], KILLED, 1),
        ([*BEGUN, failure(0, "did not stop", stopping=True)], Ended(failures={0: 1}), 1),
        ([*BEGUN, {"event": "stop", "step": 4, "name": "time_limit"}], KILLED, 1),
        ([*BEGUN, {"event": "control", "step": 4, "command": "stop", "state": "accepted"}], KILLED, 1),
        ([], Ended(signal=signal.SIGTERM), 75),
        ([], Ended(signal=signal.SIGINT), 130),
        ([{"event": "run_end", "step": 9, "status": "stopped", "exit_code": 75}], Ended(signal=signal.SIGTERM), 75),
    ],
    ids=["environment", "environment that took no word", "agreed", "not stopped", "signal", "deadline", "limit",
        "command", "sigterm", "sigint", "stopped"],
)  # fmt: skip
def test_what_would_happen_again_and_what_was_asked_for_is_not_started_again(run, said, ended, code):
    found, events = run("restarts = 5", [(said, ended)])
    assert found == code and not of(events, "restart") and len(of(events, "run_end")) == 1


LOST = {"event": "failure", "step": 0, "rank": 0, "error": "lost contact", "exit_code": 1, "lost": True}


@pytest.mark.parametrize(("said", "ended", "name", "reason"), [
    ([], Ended(signal=signal.SIGHUP), "sigterm", "xtrain run received SIGHUP before the first step"),
    ([], Ended(signal=signal.SIGUSR1), "sigusr1", "xtrain run received SIGUSR1 before the first step"),
    ([], Ended(signal=signal.SIGTERM, who="the first rank"), "sigterm", "the first rank received SIGTERM before"),
    ([], Ended(failures={1: -signal.SIGTERM}), "sigterm", "rank 1 was killed by SIGTERM before the first step"),
    ([], Ended(failures={0: -signal.SIGTERM, 1: -signal.SIGINT}), "sigint", "rank 1 was killed by SIGINT before"),
    ([LOST], Ended(failures={0: 1, 1: -signal.SIGINT}), "sigint", "rank 1 was killed by SIGINT before the first"),
    (BEGUN, Ended(signal=signal.SIGINT, at_once=True), "sigint", "Ctrl-C was pressed a second time"),
])  # fmt: skip
def test_a_stop_that_no_rank_could_answer_names_its_cause(run, said, ended, name, reason):
    _, events = run("restarts = 5", [(said, ended)])
    (stop,), (end,) = of(events, "signal"), of(events, "run_end")
    assert end["status"] == ("interrupted" if name == "sigint" else "stopped")
    assert end["reason"].startswith(reason) and stop["reason"] == end["reason"] and stop["name"] == name


def test_a_rank_that_leaves_without_a_word_has_not_been_stopped(run):
    """The agent sends SIGTERM to all others then, which is nobody's wish that the run be stopped."""
    left = ([], Ended(failures={0: 1, 1: -signal.SIGTERM}))
    code, events = run("restarts = 0", [left])
    (end,) = of(events, "run_end")
    assert code == 1 and end["status"] == "failed" and end["reason"] == "rank 0 exited with code 1"
    assert run("restarts = 1", [left, (DONE, Ended())])[0] == 0, "it may be started again"


def test_a_failure_that_all_have_agreed_on_is_reported_once(run):
    _, events = run("restarts = 1", [([failure(0, "loss nan", agreed=True)], Ended(failures={0: 1, 1: 1}))])
    assert [(e["rank"], e["error"]) for e in of(events, "failure")] == [(0, "loss nan")]


def test_where_ranks_stood_still_their_failure_is_all_that_is_reported(run):
    said = [{"event": "stuck", "ranks": [1], "node": "step.forward", "seconds": 600.0}, failure(1, "it stood still")]
    _, events = run("restarts = 0", [(said, Ended(failures={1: -9, 0: 1}))])
    assert [e["rank"] for e in of(events, "failure")] == [1]


def test_worker_groups_that_fail_before_they_have_begun_are_given_up_early(run):
    code, events = run("restarts = 100", [([failure(1, "no such module")], Ended(failures={1: 1}))] * 3)
    assert code == 1 and len(of(events, "restart")) == 2
    assert "a restart would fail in the same way" in of(events, "failure")[-1]["error"]


def test_one_that_had_begun_between_counts_anew(run):
    lost = ([failure(1, "no such module")], Ended(failures={1: 1}))
    code, _ = run("restarts = 100", [lost, lost, (BEGUN, KILLED), lost, lost, (DONE, Ended())])
    assert code == 0


def test_a_stop_request_between_two_starts_stops_the_run(run, monkeypatch):
    monkeypatch.setattr(restarts_module, "SHORTEST", 30.0)

    def killed_then_asked() -> Ended:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        return KILLED

    previous = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    try:
        code, events = run("restarts = 2", [(BEGUN, killed_then_asked)])
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert code == 75
    (end,) = of(events, "run_end")
    assert end["status"] == "stopped" and not of(events, "failure")
    assert end["reason"] == "xtrain run received SIGTERM before the ranks were started again"


def test_a_stop_request_before_the_first_ranks_are_started_is_heard(run, tmp_path):
    def asked() -> Ended:
        os.kill(os.getpid(), signal.SIGTERM)  # would end this process if nobody listened
        return KILLED

    assert run("restarts = 2", [(BEGUN, asked)])[0] == 75
    notes = StopNotes(signal=signal.SIGTERM)
    assert launch(tmp_path, "attempt", ranks=1, stop_seconds=1.0, notes=notes) == Ended(signal=signal.SIGTERM)
    assert list((tmp_path / "logs" / "attempt").iterdir()) == []


def test_the_same_rank_twice_without_a_checkpoint_between_means_fewer_ranks(run, seen):
    settings = "restarts = 5, elastic = 1..4"
    code, events = run(settings, [(BEGUN, KILLED), (BEGUN, KILLED), (BEGUN, KILLED), (DONE, Ended())], world=4)
    assert code == 0
    assert [each["ranks"] for each in seen] == [4, 4, 2, 2]
    assert [e["world"] for e in of(events, "restart")] == [4, 2, 2]
    assert len({each["plan"] for each in seen}) == 2


def test_another_rank_each_time_stays_at_as_many(run, seen):
    other = Ended(failures={2: -9})
    code, _ = run("restarts = 5, elastic = 1..4", [(BEGUN, KILLED), (BEGUN, other), (DONE, Ended())], world=4)
    assert code == 0 and [each["ranks"] for each in seen] == [4, 4, 4]


def test_fewer_devices_mean_fewer_ranks(run, monkeypatch, seen):
    monkeypatch.setattr("xtrain.runtime.jobs.restarts._devices", lambda plan: 3)
    code, _ = run("restarts = 5, elastic = 1..4", [(BEGUN, KILLED), (DONE, Ended())], world=4)
    assert code == 0 and [each["ranks"] for each in seen] == [4, 2]


def test_too_few_devices_for_every_world_are_a_fault_of_the_environment(run, monkeypatch):
    monkeypatch.setattr("xtrain.runtime.jobs.restarts._devices", lambda plan: 1)
    code, events = run("restarts = 5, elastic = 2..4", [(BEGUN, KILLED)], world=4)
    assert code == 3 and of(events, "failure")[-1]["code"] == "X702"


def test_another_plan_than_the_recorded_one_is_not_run(run, monkeypatch):
    real = restarts_module.plan_from_text
    monkeypatch.setattr(
        restarts_module,
        "plan_from_text",
        lambda text, name, world: real(text.replace("seed = 3", "seed = 4"), name, world=world),
    )
    twice = [(BEGUN, KILLED), (BEGUN, KILLED)]
    code, events = run("restarts = 5, elastic = 1..4", twice, world=4)
    assert code == 3 and of(events, "failure")[-1]["code"] == "X711"


# Why a worker group has failed ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("said", "ended", "reason", "ranks"), [
    ([], Ended(failures={2: -9, 0: 1}), "rank 2 was killed by SIGKILL", (2,)),
    ([], Ended(failures={1: -9, 3: -9}), "ranks 1, 3 were killed by SIGKILL", (1, 3)),
    ([failure(0, "gone", lost=True), failure(1, "bad\nline")], Ended(), "rank 1 failed: bad", (1,)),
    ([failure(0, "gone", lost=True)], Ended(failures={0: 1, 1: 1}), "rank 1 exited with code 1", (1,)),
    ([{"event": "stuck", "ranks": [1], "node": "step.forward", "seconds": 12.0}, failure(1)],
        Ended(failures={1: -9, 0: 1}), "rank 1 made no progress in step.forward for 12.0 s", (1,)),
    ([failure(0, "bad")], Ended(failures={0: 1, 1: -signal.SIGTERM}), "rank 0 failed: bad", (0,)),
    ([], Ended(failures={0: 7, 1: -signal.SIGTERM}), "rank 0 exited with code 7", (0,)),
    ([], Ended(failures={1: -signal.SIGTERM}), "rank 1 was killed by SIGTERM", (1,)),
    ([], Ended(), "the ranks exited without reporting a reason", ()),
])  # fmt: skip
def test_the_first_cause_is_named(said, ended, reason, ranks):
    cause = find_failure_cause(events_of(said), ended)
    assert cause is not None and (cause.reason, cause.ranks) == (reason, ranks)


# What is left of a worker group ------------------------------------------------------------------------------------


def test_ranks_that_are_left_are_killed_even_if_they_are_stopped(tmp_path):
    worker = subprocess.Popen(rank_command(tmp_path, os.getpid()))
    try:
        deadline = time.monotonic() + 10
        while not ranks_of(tmp_path, os.getpid()) and time.monotonic() < deadline:
            time.sleep(0.001)  # its command is to be seen once the kernel has set it up
        os.kill(worker.pid, signal.SIGSTOP)
        assert ranks_of(tmp_path, os.getpid()) == [worker.pid]
        assert ranks_of(tmp_path, os.getpid() + 1) == []
        end_leftovers(tmp_path)
        assert worker.wait(timeout=5) == -signal.SIGKILL
    finally:
        worker.kill()


def test_a_lock_that_another_process_has_is_no_leftover(tmp_path, monkeypatch):
    from xtrain.runtime.jobs import launch as leftovers

    monkeypatch.setattr(leftovers, "PATIENCE", 0.2)
    code = "import fcntl, sys; f = open('.worker.lock', 'a'); fcntl.flock(f, 2); print(1, flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(EnvironmentFault) as refused:
            end_leftovers(tmp_path)
        assert refused.value.code == "X707"
        holder.kill()


def test_a_process_that_does_not_exit_is_named(tmp_path, monkeypatch):
    """One that waits for its disk hears no signal."""
    from xtrain.runtime.jobs import launch as leftovers

    monkeypatch.setattr(leftovers, "PATIENCE", 0.0)
    monkeypatch.setattr(leftovers, "ranks_of", lambda directory, launcher: [17, 23])
    monkeypatch.setattr("os.kill", lambda pid, number: None)
    with pytest.raises(EnvironmentFault, match="do not exit: 17, 23; it is not safe to continue") as refused:
        end_leftovers(tmp_path)
    assert refused.value.code == "X707"
