"""Ranks that torchrun or srun has started: what stands on the screen, what stops them, agents of several machines."""

import os
import signal
import socket
import subprocess
import time
from datetime import timedelta
from pathlib import Path

import pytest
from forking import ForkedCommand
from live_runs import slow_set_up, wait_for_slow_set_up
from projects import Project, curve, events, records
from saboteur import AT_SETUP, environment, sabotage
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import PrefixStore

SLOW = pytest.mark.slow
SAVES = "every 4 steps checkpoint\n"


def start(project: Project, *arguments: str, agent: tuple[str, ...] = ("--standalone",), ranks: int = 2, **more: str):
    """torchrun with so many ranks; what it and they print goes to one place, as on a terminal."""
    command = project.command("run", *arguments, "--ui", "plain")
    command[2:3] = ["torch.distributed.run", *agent, "--nproc-per-node", str(ranks), "-m", "xtrain"]
    return subprocess.Popen(
        command,
        cwd=project.folder,
        env={**environment(project), **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def start_forked(project: Project, *arguments: str, ranks: int) -> ForkedCommand:
    """The same without an interpreter for each."""
    arguments = ("run", *arguments, "--ui", "plain")
    return ForkedCommand(arguments, project.folder, environment(project), torchrun=ranks, one_output=True)


def shown(process: subprocess.Popen | ForkedCommand, seconds: float = 200) -> str:
    return process.communicate(timeout=seconds)[0]


def wrong_setting(project: Project) -> tuple[str, ...]:
    return (project.spec(more="batch { sequense = 8 }"),)


def bad_data(project: Project) -> tuple[str, ...]:
    with (project.folder / "data.jsonl").open("a") as file:
        file.write('{"text": 3')
    return (project.spec(),)


def another_seed(project: Project) -> tuple[str, ...]:
    spec = project.spec(steps=4)
    project.run(spec, "--set", 'workspace.run="mine"')
    return spec, "--set", 'workspace.run="mine"', "--set", "experiment.seed=9", "--set", "experiment.budget=8 steps"


def no_rank_1(project: Project) -> tuple[str, ...]:
    sabotage(project, AT_SETUP, rank=1)
    return (project.spec(),)


def too_many_ranks(project: Project) -> tuple[str, ...]:
    return project.spec(), "--world", "4"


@pytest.mark.parametrize(
    ("mistake", "said", "ranks"),
    [(wrong_setting, "error[X203]", 2), pytest.param(wrong_setting, "error[X203]", 4, marks=SLOW),
        pytest.param(bad_data, "error[X507]", 2, marks=SLOW), pytest.param(bad_data, "error[X507]", 4, marks=SLOW),
        pytest.param(another_seed, "error[X705]", 4, marks=SLOW),
        pytest.param(too_many_ranks, "error[X703]", 2, marks=SLOW),
        pytest.param(no_rank_1, "error: rank 1: this rank does not come up", 2, marks=SLOW)],
)  # fmt: skip
def test_what_is_wrong_is_the_last_thing_on_the_screen(project, mistake, said, ranks):
    arguments = mistake(project)
    if "--world" not in arguments:
        arguments = (*arguments, "--world", str(ranks))
    # What sabotages an import needs interpreters.
    begin = start if mistake is no_rank_1 else start_forked
    process = begin(project, *arguments, ranks=ranks)
    screen = shown(process)
    assert process.returncode != 0
    # What torchrun itself says ends with the file that the first rank has left for it.
    last = screen.rpartition("traceback : ")[2]
    assert said in last and "Failures:" not in last, screen
    assert screen.count(said) <= 3, "when it was found, by the view, and at the end"
    assert "Connection closed" not in screen and "gloo" not in screen, screen
    assert screen.count("Traceback") <= (3 if mistake is no_rank_1 else 1), screen


def alone(project: Project, rank: int, world: int, port: int, *arguments: str) -> subprocess.Popen:
    """A rank as srun starts it, without any agent."""
    place = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    return subprocess.Popen(
        project.command("run", *arguments, "--world", str(world), "--ui", "plain"),
        cwd=project.folder,
        env={**environment(project), **place, "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


@SLOW
def test_ranks_without_an_agent_leave_together_and_one_of_them_speaks(project):
    port = free_port()
    ranks = [alone(project, rank, 2, port, project.spec(more="batch { sequense = 8 }")) for rank in (1, 0)]
    (second, first) = [process.communicate(timeout=100) for process in ranks]
    assert [process.returncode for process in ranks] == [2, 2]
    assert first[1].count("X203") == 1 and second == ("", "")
    ranks = [alone(project, rank, 2, port, project.spec(steps=4)) for rank in (1, 0)]
    (second, first) = [process.communicate(timeout=100) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], first[1] + second[1]
    assert "end  done" in first[0] and second == ("", "")


@SLOW
def test_a_rank_without_an_agent_leaves_when_the_first_one_is_gone(project):
    port = free_port()
    (second, first) = [alone(project, rank, 2, port, project.spec(steps=4)) for rank in (1, 0)]
    while first.poll() is None and socket.socket().connect_ex(("localhost", port)):
        time.sleep(0.02)
    # Before it has met the first one, a rank waits for it.
    store = PrefixStore("xtrain", TCPStore("localhost", port, is_master=False, timeout=timedelta(seconds=60)))
    while first.poll() is None and not store.add("arrivals", 0):
        time.sleep(0.02)
    first.kill()
    first.communicate()
    out, err = second.communicate(timeout=60)
    assert second.returncode == 3 and out == "" and "Traceback" not in err
    assert err.splitlines()[-1].startswith("error[X716]: rank 1 of 2: the first rank is not there at localhost:"), err


@SLOW
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_first_rank_without_an_agent_that_waits_for_others_can_be_stopped(project, number):
    first = alone(project, 0, 2, free_port(), project.spec(steps=4))
    deadline = time.monotonic() + 90
    while not list(project.folder.glob("runs/tiny/*/plan.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1)
    first.send_signal(number)
    out, err = first.communicate(timeout=60)
    assert first.returncode == (130 if number == signal.SIGINT else 75), out + err
    (end,) = events(project.directory(), "run_end")
    assert end["reason"] == f"the first rank received {number.name} before the first step"


# Agents of several machines ------------------------------------------------------------------------------------------


class Agents:
    """Two of them on this machine, with a rank each, that meet at one port."""

    def __init__(self, project: Project, spec: str, **more: str) -> None:
        self.project, self.spec, self.more = project, spec, more
        meets = f"localhost:{free_port()}"
        self.agent = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", meets, "--rdzv-id", "job")
        self.agent += ("--max-restarts", "3", "--local-addr", "localhost")
        self.running = [self.start()]
        time.sleep(2)  # the first one holds the store
        self.running.append(self.start())

    def start(self) -> subprocess.Popen:
        return start(self.project, self.spec, "--world", "2", agent=self.agent, ranks=1, **self.more)

    def rank_of(self, agent: subprocess.Popen) -> int:
        found = subprocess.run(["pgrep", "-P", str(agent.pid)], capture_output=True, text=True).stdout.split()
        return int(found[0])

    def reach(self, step: int) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            for path in self.project.folder.glob("runs/tiny/*/metrics.jsonl"):
                if path.read_text().count('"loss"') >= step:
                    return
            time.sleep(0.05)
        raise AssertionError(f"step {step} was not reached")

    def end(self) -> str:
        try:
            said = [shown(agent) for agent in self.running]
            assert [agent.returncode for agent in self.running] == [0, 0], "\n".join(said)
            return "\n".join(said)
        finally:
            for agent in self.running:
                agent.kill()


NODES = "launch { nodes = 2 }\ncheckpoint { resume = false }\n"


def assert_unbroken(project: Project, directory: Path, steps: int) -> None:
    assert [step for step, *_ in curve(directory)] == list(range(1, steps + 1))
    assert not list(directory.parent.glob("*~*")), "a restart goes on, whatever resume says"
    whole = project.run(project.spec(steps=steps, more=SAVES), "--world", "2", root="unbroken")
    assert curve(directory) == curve(whole)


@SLOW
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_costs_what_was_not_saved(project, victim):
    agents = Agents(project, project.spec(steps=60, more=SAVES + NODES))
    agents.reach(6)
    os.kill(agents.rank_of(agents.running[victim]), signal.SIGKILL)
    agents.end()
    directory = project.directory()
    assert len(events(directory, "run_start")) == 2 and events(directory, "resumed")
    assert_unbroken(project, directory, 60)


@SLOW
def test_an_agent_that_is_killed_and_started_again_finds_the_run(project):
    """It counts its restarts from 0, and the other one has counted on. torch 2.13 needs a store of its own for each
    start here: agents that share one do not tell a new one where it is."""
    agents = Agents(project, project.spec(steps=60, more=SAVES + NODES), TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    agents.reach(6)
    gone = agents.running.pop()
    gone.kill()
    gone.communicate()
    agents.running.append(agents.start())
    agents.end()
    directory = project.directory()
    assert [start["attempt"] for start in events(directory, "run_start")] == [1, 2]
    assert_unbroken(project, directory, 60)


# Stops ---------------------------------------------------------------------------------------------------------------


@SLOW
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_a_stop_in_set_up_is_reported_by_the_first_rank_although_it_waits_for_another(project, number):
    slow_set_up(project)
    process = start(project, project.spec(), "--world", "2")
    wait_for_slow_set_up(project)
    time.sleep(1)  # the first rank waits in the next collective by then
    process.send_signal(number)
    screen = shown(process, 60)
    (end,), (said,) = events(project.directory(), "run_end"), events(project.directory(), "signal")
    assert end["reason"] == said["reason"] == f"the first rank received {number.name} before the first step"
    assert end["status"] == ("interrupted" if number == signal.SIGINT else "stopped"), screen
    assert not events(project.directory(), "failure") and end["reason"] in screen


@SLOW
def test_every_stop_in_a_run_names_its_cause(project):
    for more, sets, reason in (
        ("every 3 steps checkpoint then stop\n", (), "tick: every 3 steps … stop"),
        ("", ("launch.stop_at=2 steps",), "stop_at: the run stops after step 2 of 6"),
    ):
        spec = project.spec(more=more)
        words = [word for text in sets for word in ("--set", text)]
        directory = project.run(spec, *words, "--set", "checkpoint.resume=false", expect=75)
        (end,) = events(directory, "run_end")
        assert end["status"] == "stopped" and end["reason"] == reason
        assert [said["reason"] for said in records(directory, "events") if said["event"] == "stop"] == [
            reason.partition(": ")[2]
        ]
