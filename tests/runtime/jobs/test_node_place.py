"""Which machine of several this is, and what becomes of the ranks that it starts."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.hosts import FIRST_PORT, PORTS, NodePlace, first_host, job_port, node_place
from xtrain.runtime.jobs.launch import exit_code_of_all, run_node

STEP = {"STEP_ID": "0", "STEP_NUM_TASKS": "2", "STEP_NUM_NODES": "2", "NODEID": "1", "STEP_NODELIST": "n[07-08]"}


def plan(nodes: int):
    return SimpleNamespace(launch={"nodes": nodes})


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch):
    for name in ("SLURM_STEP_ID", "SLURM_PTY_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("hosts", "first"), [
    ("n1", "n1"),
    ("n[1-4]", "n1"),
    ("gpu-[007,009-012],m3", "gpu-007"),
    ("a,b", "a"),
    ("127.0.0.[1-2]", "127.0.0.1"),
    ("rack[2-3]-ib", "rack2-ib"),
    ("n01.cluster.example", "n01.cluster.example"),
])  # fmt: skip
def test_the_first_host_of_a_list_of_slurm(hosts, first):
    assert first_host(hosts) == first


def test_ports_of_a_job_differ_from_step_to_step():
    starts = [
        {"SLURM_JOB_ID": job, "SLURM_STEP_ID": step, "SLURM_RESTART_COUNT": again}
        for job in ("17", "18")
        for step in ("0", "1")
        for again in ("0", "1")
    ]
    ports = [job_port(each) for each in starts]
    assert len(set(ports)) == len(ports) and all(FIRST_PORT <= port < FIRST_PORT + PORTS for port in ports)


def test_where_this_machine_is():
    assert node_place(plan(1), None, None) is None
    assert node_place(plan(2), None, None) is None  # then the run says that it is for several
    assert node_place(plan(2), 1, "n01:29500") == NodePlace(index=1, host="n01", port=29500)
    assert node_place(plan(2), 0, "[::1]:29500") == NodePlace(index=0, host="::1", port=29500)
    assert node_place(plan(1), 0, "n01:29500") is None


def test_slurm_says_it(monkeypatch):
    for name, value in STEP.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    place = node_place(plan(2), None, None)
    assert place is not None and (place.index, place.host) == (1, "n07")
    assert node_place(plan(2), 0, "m3:29500") == NodePlace(index=0, host="m3", port=29500), "what is said counts"


def test_a_shell_that_srun_has_opened_is_no_start(monkeypatch):
    """`srun --pty bash` in an allocation of eight tasks: what is typed there is for this machine."""
    for name, value in {**STEP, "STEP_NUM_TASKS": "8", "PTY_PORT": "43259"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert node_place(plan(1), None, None) is None


@pytest.mark.parametrize(("nodes", "index", "meet", "says"), [
    (2, 0, None, "--node and --meet belong together"),
    (2, None, "n01:1", "--node and --meet belong together"),
    (2, 2, "n01:29500", "--node 2 of a plan for 2 nodes"),
    (2, 0, "n01", "`n01` is not a valid address to meet at"),
    (2, 0, "n01:99999", "is not a valid address to meet at"),
])  # fmt: skip
def test_places_that_cannot_be(nodes, index, meet, says):
    with pytest.raises(EnvironmentFault, match=says) as refused:
        node_place(plan(nodes), index, meet)
    assert refused.value.code == "X703"


@pytest.mark.parametrize(("nodes", "changes", "says"), [
    (2, {"STEP_NUM_TASKS": "16"}, "16 tasks on 2 nodes"),
    (1, {"STEP_NUM_TASKS": "8", "STEP_NUM_NODES": "1"}, "8 tasks on 1 node, but"),  # each would be a whole run
    (4, {}, "the plan is for 4 nodes, but this Slurm step has 2"),
])  # fmt: skip
def test_steps_of_slurm_that_do_not_fit(monkeypatch, nodes, changes, says):
    for name, value in {**STEP, **changes}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    with pytest.raises(EnvironmentFault, match=says):
        node_place(plan(nodes), None, None)


@pytest.mark.parametrize(("codes", "asked", "code"), [
    ([0, 0], [], 0),
    ([75, 75], [], 75),
    ([0, 75], [], 75),
    ([75, 1], [], 1),
    ([-9, 3], [], 3),
    ([0, -9], [], 1),
    ([-signal.SIGUSR1, -signal.SIGUSR1], [signal.SIGUSR1], 75),  # they were only starting
    ([-signal.SIGINT, 0], [signal.SIGINT], 130),
    ([-signal.SIGUSR1], [], 1),
    ([-signal.SIGUSR1, 2], [signal.SIGUSR1], 2),
])  # fmt: skip
def test_one_exit_code_for_a_machine(codes, asked, code):
    assert exit_code_of_all(codes, asked) == code


RANK = """
import os, signal, sys, time
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
print(*(os.environ[name] for name in names), file=open(f"rank-{os.environ['RANK']}", "w"), flush=True)
def stop(number, frame):
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
open(f"ready-{os.environ['RANK']}", "w").close()
while not os.path.exists(f"end-{os.environ['RANK']}"):
    time.sleep(0.02)
sys.exit(int(open(f"end-{os.environ['RANK']}").read()))
"""
LAUNCH = """
from xtrain.runtime.jobs import launch as node_ranks

import sys
node_ranks.AFTER_FAILURE = 0.2
place = node_ranks.NodePlace(index=1, host="n01", port=29500)
sys.exit(node_ranks.run_node(place, 3, 2, [sys.executable, "rank.py"]))
"""


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """A machine with ranks 2 and 3 of 6."""
    monkeypatch.chdir(tmp_path)
    Path("rank.py").write_text(RANK)
    process = subprocess.Popen([sys.executable, "-c", LAUNCH])
    deadline = time.monotonic() + 60
    while not (Path("ready-2").exists() and Path("ready-3").exists()):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    yield process
    process.kill()


def test_ranks_of_a_machine(launched):
    assert Path("rank-2").read_text() == "2 6 0 2 n01 29500\n"
    assert Path("rank-3").read_text() == "3 6 1 2 n01 29500\n"
    launched.send_signal(signal.SIGTERM)
    assert launched.wait(120) == 75


def test_a_rank_that_fails_takes_the_others_along(launched):
    Path("end").write_text("3")
    Path("end").rename("end-3")  # whole as soon as it is there
    assert launched.wait(120) == 3


def test_ranks_that_were_killed_are_told_of(monkeypatch, capfd):
    """They could not say it themselves; those that are killed because of them are not named, nor is a stop."""
    monkeypatch.setattr("xtrain.runtime.jobs.launch.signal.signal", lambda *_: None)
    monkeypatch.setattr("xtrain.runtime.jobs.launch.AFTER_FAILURE", 0.1)
    body = "case $RANK in 4) kill -9 $$;; 5) kill -37 $$;; 6) exit 0;; esac; exec sleep 60"
    place = NodePlace(index=1, host="n01", port=29500)
    assert run_node(place, 2, 4, ["sh", "-c", body]) == 1
    told = ["xtrain run: rank 4 was killed by SIGKILL", "xtrain run: rank 5 was killed by signal 37"]
    assert sorted(capfd.readouterr().err.splitlines()) == told
