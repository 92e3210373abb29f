"""Limits on open files, processes and shared memory: compared before ranks start, and named where they are met."""

import errno
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from projects import Project

from xtrain.cli.main import main
from xtrain.plan.plan import Plan
from xtrain.planner.load import plan_from_spec
from xtrain.runtime.base import limits
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.limits import check_limits, limit_fault, need_of, tasks_left

EVER = resource.RLIM_INFINITY


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> Plan:
    folder = tmp_path_factory.mktemp("limits")
    found = plan_from_spec(folder / Project(folder).spec(), world=2).plan
    assert found is not None
    return found


@pytest.mark.parametrize(("files", "left", "raised", "says"), [
    ((28, 28), None, None, "a process may open 28 files, but a rank of this plan needs"),
    ((28, 1 << 20), None, "needed", None),
    ((28, EVER), None, "needed", None),
    ((1024, 4096), 100_000, None, None),
    ((EVER, EVER), None, None, None),
    ((1024, 1024), 10, None, "may start 10 more processes and threads, but the ranks of this machine need"),
])  # fmt: skip
def test_limits_are_raised_or_reported_before_ranks_start(monkeypatch, plan, files, left, raised, says):
    now = [files]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: now[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limit: now.append(limit))
    monkeypatch.setattr(limits, "tasks_left", lambda: left)
    if says:
        with pytest.raises(EnvironmentFault, match=says) as fault:
            check_limits(plan, "cpu", 2)
        assert fault.value.code == "X738"
    else:
        check_limits(plan, "cpu", 2)
    assert now[-1] == ((need_of(plan, "cpu", 2).files, files[1]) if raised else files)


def test_more_ranks_need_more(tmp_path):
    Project(tmp_path).spec()
    plans = [plan_from_spec(tmp_path / "tiny.xtrain", world=world).plan for world in (1, 2, 4)]
    needs = [need_of(each, "cpu", world) for each, world in zip(plans, (1, 2, 4), strict=True) if each is not None]
    # What was counted in /proc/PID/fd and /proc/PID/task while two ranks trained, with as much again.
    assert needs[1].files >= 1.5 * 40 and needs[1].tasks >= 1.5 * 35
    assert needs[0].files < needs[1].files < needs[2].files and needs[0].tasks < needs[1].tasks < needs[2].tasks


@pytest.mark.parametrize(
    ("group", "folder"), [("0::/job/step\n", "sys/fs/cgroup"), ("5:pids:/job/step\n", "sys/fs/cgroup/pids")]
)
def test_the_limit_of_a_control_group_is_the_least_of_those_around_it(monkeypatch, tmp_path, group, folder):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (EVER, EVER))
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(group)
    for path, most, taken in (("job/step", "max", "7"), ("job", "40", "9"), ("", "100", "50")):
        place = tmp_path / folder / path
        place.mkdir(parents=True, exist_ok=True)
        (place / "pids.max").write_text(f"{most}\n")
        (place / "pids.current").write_text(f"{taken}\n")
    assert tasks_left(tmp_path) == 31


@pytest.mark.parametrize(("user", "left"), [(1000, 17), (0, None)])
def test_the_limit_of_a_user_counts_threads_and_is_none_for_root(monkeypatch, tmp_path, user, left):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (20, 20))
    monkeypatch.setattr(os, "geteuid", lambda: user)
    for task in ("7/task/7", "7/task/8", "9/task/9"):
        (tmp_path / "proc" / task).mkdir(parents=True)
    assert tasks_left(tmp_path) == left


@pytest.mark.parametrize(("error", "code", "says"), [
    (OSError(errno.EMFILE, "Too many open files"), "X738", "a process may open no more than"),
    (RuntimeError("[enforce fail at socket.cc] Too many open files\nframe #0"), "X738", "open files"),
    (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "X738", "processes and threads"),
    (RuntimeError("can't start new thread"), "X738", "processes and threads"),
    (RuntimeError("NCCL: Error while creating shared memory segment /dev/shm/nccl-x\n"), "X736", "/dev/shm/nccl-x"),
    (OSError(errno.ENOSPC, "No space left on device"), None, ""),
    (EnvironmentFault("X706", "x cannot be written: Too many open files"), None, ""),
])  # fmt: skip
def test_a_limit_that_is_met_is_named(error, code, says):
    found = limit_fault(error)
    assert (found and found.code) == code and says in str(found)


@pytest.mark.parametrize("error", [OSError(errno.EINVAL, "Invalid argument"), OverflowError("timestamp too large")])
@pytest.mark.parametrize("year", [2340, 2026, None])
def test_a_clock_that_was_set_is_named(monkeypatch, error, year):
    """As torch's sleep between two looks at its ranks meets it."""

    def now() -> time.struct_time:
        if year is None:
            raise OverflowError("timestamp too large to convert to C _PyTime_t")
        return time.struct_time((year, 1, 1, 0, 0, 0, 0, 1, 0))

    monkeypatch.setattr(time, "gmtime", now)
    found = limit_fault(error)
    assert (found and found.code) == (None if year == 2026 else "X739")


def test_a_run_with_few_files_is_refused_in_one_line(tmp_path):
    spec = Project(tmp_path).spec()
    limit = "resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))"
    code = f"import resource\nfor files in (28, 16):\n {limit}\n from xtrain.cli.main import main\n"
    code += f" print(main(['run', '{spec}', '--ui', 'plain']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["3", "3"], done
    refused = [line for line in done.stderr.splitlines() if "error[" in line]
    texts = [f"error[X738]: a process may open {files} files" for files in (28, 16)]
    assert [line[: len(text)] for line, text in zip(refused, texts, strict=True)] == texts
    assert not Path(tmp_path / "runs").exists()


def test_a_command_that_meets_the_limit_says_so(monkeypatch, capsys):
    def refuse(arguments):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("xtrain.cli.docs.run", refuse)
    assert main(["docs"]) == 3
    assert capsys.readouterr().err.startswith("error[X738]: a process may open no more than")


def test_a_launcher_that_cannot_start_ranks_says_so(monkeypatch, plan, tmp_path, capsys):
    from xtrain.runtime.jobs import restarts

    def launch(*given, **named):
        raise OSError(errno.EMFILE, "Too many open files")

    said: list[EnvironmentFault] = []
    monkeypatch.setattr(restarts, "launch", launch)
    monkeypatch.setattr(restarts.RestartLoop, "_end_with", lambda self, fault, cause: said.append(fault) or 3)
    monkeypatch.setattr(restarts.StopNotes, "listen", lambda self: None)
    workspace = SimpleNamespace(directory=tmp_path, attempt="a")
    assert restarts.RestartLoop(plan=plan, workspace=workspace).run() == 3  # pyright: ignore
    assert [each.code for each in said] == ["X738"]
