"""The launchers of several machines: what the first one has done on another one, and what becomes of ranks if either is
gone. Other machines are processes that share a store with this one."""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from xtrain.plan.plan import Plan
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.hosts import NodePlace
from xtrain.runtime.base.process import BEGAN
from xtrain.runtime.jobs import machines as first_node
from xtrain.runtime.jobs import machines as other_node
from xtrain.runtime.jobs import replica_groups
from xtrain.runtime.jobs.machines import FirstNode, RankProcess, RankStart, follow_first_node
from xtrain.runtime.jobs.replica_groups import _Launcher

WAITS = 15.0
ENDLESS = "cd {}; trap 'touch saved; exit 0' TERM; touch ready; for i in {{1..1500}}; do sleep 0.02; done"
PLAN = cast("Plan", SimpleNamespace(id="p", launch={"nodes": 2, "ranks_per_node": 1}))


def wait(found: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WAITS
    while not (value := found()):
        assert time.monotonic() < deadline, "not within time"
        time.sleep(0.02)
    return value


@pytest.fixture(autouse=True)
def short_patience(monkeypatch) -> None:
    """On all machines."""
    for name, seconds in (("LOST", 1.5), ("END", 1.0), ("PAUSE", 0.02)):
        for module in (first_node, other_node):
            monkeypatch.setattr(module, name, seconds)


def opened() -> FirstNode:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    return FirstNode.open(PLAN, NodePlace(index=0, host="127.0.0.1", port=port))


@pytest.fixture
def first() -> FirstNode:
    """The first machine."""
    return opened()


def no_fault() -> None:
    pass


@contextmanager
def machine(meet: NodePlace, folder: Path, check: Callable[[], None] = no_fault, plan: str = "p") -> Iterator[int]:
    """The launcher of machine 1 as a process, whose ranks are the script in `rank.sh`; it writes how it left."""
    process = os.fork()
    if not process:
        first_node.rank_command = lambda directory, launcher: ["bash", str(folder / "rank.sh")]
        other_node.planned = cast("Any", shown(folder))
        code = 1
        try:
            code = follow_first_node(NodePlace(index=1, host=meet.host, port=meet.port), plan, check, 1.0)
        except EnvironmentFault as fault:
            code = 3
            (folder / "fault").write_text(f"{fault.code}: {fault}")
        finally:
            os._exit(code)
    try:
        yield process
    finally:
        try:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


def shown(folder: Path) -> Callable[..., None]:
    def planned(directory: Path, plan: str, patience: float) -> None:
        if not (folder / "plan.json").exists():
            raise EnvironmentFault("X706", "all machines need a shared run directory")

    return planned


def script(folder: Path, text: str) -> RankStart:
    (folder / "rank.sh").write_text(text)
    (folder / "plan.json").write_text("{}")
    return RankStart(directory=str(folder), plan="p", log=str(folder / "log" / "1"), environment={"RANK": "7"})


def there(first: FirstNode) -> bool:
    first.look(False)
    return first.has(1)


def ended(first: FirstNode, rank: RankProcess) -> bool:
    first.look(True)
    return rank.poll() is not None


def code_of(process: int) -> int:
    """Of a launcher that leaves."""
    found: list[int] = []

    def left() -> bool:
        pid, status = os.waitpid(process, os.WNOHANG)
        found.append(status)
        return bool(pid)

    wait(left)
    return os.waitstatus_to_exitcode(found[-1])


def test_ranks_run_elsewhere_and_their_ends_are_known(first, tmp_path, monkeypatch):
    monkeypatch.setattr(first_node, "END", WAITS)
    with machine(first.place, tmp_path) as process:
        assert first.has(0) and not first.has(1)
        wait(lambda: there(first))
        rank = first.start(1, script(tmp_path, "echo rank $RANK; exit 5"))
        wait(lambda: ended(first, rank))
        assert (
            rank.poll() == 5
            and first.gone_with(rank) is None
            and (tmp_path / "log" / "1" / "stdout.log").read_text() == "rank 7\n"
        )
        began = time.monotonic()
        first.close(75)
        assert code_of(process) == 75 and time.monotonic() - began < WAITS / 2


def test_signals_reach_ranks_and_kills_end_them(first, tmp_path):
    with machine(first.place, tmp_path):
        wait(lambda: there(first))
        given = script(
            tmp_path, f"trap 'exit 9' USR1; touch {tmp_path}/ready$$; for i in {{1..1500}}; do sleep 0.02; done"
        )
        asked, killed = (first.start(1, given) for _ in range(2))
        wait(lambda: len([*tmp_path.glob("ready*")]) == 2)
        asked.send_signal(signal.SIGUSR1)
        wait(lambda: ended(first, asked))
        assert asked.poll() == 9 and not ended(first, killed)
        killed.send_signal(signal.SIGKILL)
        assert killed.wait() == -signal.SIGKILL


def test_the_time_since_the_command_began_is_told_by_no_clock(first, tmp_path):
    """Clocks of machines differ, and may be set meanwhile; `launch.time_limit` counts by the monotonic one."""
    with machine(first.place, tmp_path):
        wait(lambda: there(first))
        given = script(tmp_path, f"echo $XTRAIN_BEGAN > {tmp_path}/began; exit 0")
        given.environment[BEGAN] = str(time.monotonic() - 5000)
        rank = first.start(1, given)
        wait(lambda: ended(first, rank))
    assert time.monotonic() - float((tmp_path / "began").read_text()) == pytest.approx(5000, abs=60)
    assert BEGAN in given.environment


def test_a_signal_to_the_other_machine_is_told_to_the_first(first, tmp_path):
    with machine(first.place, tmp_path) as process:
        wait(lambda: there(first))
        os.kill(process, signal.SIGTERM)
        assert wait(lambda: first.look(True)) == [signal.SIGTERM]


def test_one_that_says_nothing_is_gone_and_may_come_back(first, tmp_path):
    with machine(first.place, tmp_path) as process:
        wait(lambda: there(first))
        rank = first.start(1, script(tmp_path, "sleep 60"))
        os.kill(process, signal.SIGKILL)
        wait(lambda: ended(first, rank))
        assert rank.poll() == -signal.SIGKILL and not first.has(1)
        with machine(first.place, tmp_path):
            wait(lambda: there(first))
            again = first.start(1, script(tmp_path, "exit 0"))
            wait(lambda: ended(first, again))
            assert (rank.poll(), again.poll()) == (-signal.SIGKILL, 0)


def test_one_that_comes_back_at_once_has_none_of_its_ranks(first, tmp_path):
    with machine(first.place, tmp_path) as process:
        wait(lambda: there(first))
        rank = first.start(1, script(tmp_path, "sleep 60"))
        os.kill(process, signal.SIGKILL)
        with machine(first.place, tmp_path):
            wait(lambda: ended(first, rank))
            assert first.has(1) and first.gone_with(rank) == 1


def test_one_that_was_slow_is_sent_away(first, tmp_path):
    """Its ranks have ended for the first machine: they must not go on."""
    with machine(first.place, tmp_path) as process:
        wait(lambda: there(first))
        rank = first.start(1, script(tmp_path, f"touch {tmp_path}/ready; exec sleep 60"))
        wait((tmp_path / "ready").exists)
        os.kill(process, signal.SIGSTOP)
        wait(lambda: ended(first, rank))
        os.kill(process, signal.SIGCONT)
        assert code_of(process) == 3


def test_without_the_first_one_ranks_are_asked_to_stop(tmp_path):
    alone = [opened()]
    with machine(alone[0].place, tmp_path) as process:
        wait(lambda: there(alone[0]))
        alone[0].start(1, script(tmp_path, ENDLESS.format(tmp_path)))
        wait((tmp_path / "ready").exists)
        alone.clear()
        assert code_of(process) == 3
    assert (tmp_path / "saved").exists()
    assert (tmp_path / "fault").read_text().startswith("X716: node 1 cannot reach the first node at 127.0.0.1")


def test_a_machine_that_does_not_fit_ends_the_run(first, tmp_path):
    def check() -> None:
        raise EnvironmentFault("X702", "this run needs 2 CUDA devices; this machine has 1")

    with machine(first.place, tmp_path, check) as process:
        assert code_of(process) == 3
        with pytest.raises(EnvironmentFault, match="node 1: this run needs 2 CUDA devices") as told:
            wait(lambda: there(first))
        assert told.value.code == "X702"
        began = time.monotonic()
        first.close(3)
        assert time.monotonic() - began < 0.9


def test_a_machine_without_the_run_directory_is_told_of(first, tmp_path, monkeypatch):
    monkeypatch.setattr(other_node, "SHOWS", 0.2)
    with machine(first.place, tmp_path):
        wait(lambda: there(first))
        given = script(tmp_path, "exit 0")
        (tmp_path / "plan.json").unlink()
        rank = first.start(1, given)
        with pytest.raises(EnvironmentFault, match="node 1: all machines need a shared run directory"):
            wait(lambda: first.look(False))
        assert rank.poll() == 3


def test_machines_that_do_not_come_are_named(first, monkeypatch):
    monkeypatch.setattr(first_node, "ARRIVAL", 0.1)
    time.sleep(0.2)
    with pytest.raises(EnvironmentFault, match=r"of 2 nodes that meet at .* these have not arrived within 0.1 s: 1"):
        first.look(False)


def test_a_place_that_is_taken_is_told_of(first):
    with pytest.raises(EnvironmentFault, match="use a --meet") as told:
        FirstNode.open(PLAN, first.place)
    assert told.value.code == "X716"


def test_a_launcher_that_waits_for_the_first_one_can_be_stopped(tmp_path):
    with machine(NodePlace(index=0, host="127.0.0.1", port=1), tmp_path) as process:
        time.sleep(0.3)
        os.kill(process, signal.SIGTERM)
        assert code_of(process) == 75


def test_another_plan_is_told_of(first, tmp_path):
    with machine(first.place, tmp_path, plan="other") as process:
        assert code_of(process) == 3
    says = "node 1 has plan other, but node 0 has plan p"
    assert (tmp_path / "fault").read_text().startswith(f"X703: {says}")
    first.look(True)  # it is none of a run that is under way
    with pytest.raises(EnvironmentFault, match=says):
        first.look(False)


def test_a_launcher_whose_place_is_taken_leaves(first, tmp_path):
    """Its ranks have ended for the first machine."""
    with machine(first.place, tmp_path) as before:
        wait(lambda: there(first))
        rank = first.start(1, script(tmp_path, "sleep 60"))
        with machine(first.place, tmp_path):
            wait(lambda: ended(first, rank))
            assert first.has(1) and code_of(before) == 3


def test_a_rank_that_is_not_started_yet_hears_of_a_stop(first, tmp_path):
    with machine(first.place, tmp_path):
        wait(lambda: there(first))
        given = script(tmp_path, "sleep 60")
        (tmp_path / "plan.json").unlink()
        rank = first.start(1, given)
        rank.send_signal(signal.SIGTERM)
        wait(lambda: ended(first, rank))
        assert rank.poll() == -signal.SIGTERM


def test_one_that_comes_late_is_let_go(first, tmp_path):
    """The run has ended before it came."""
    with machine(first.place, tmp_path) as process:
        first.close(3)
        assert code_of(process) == 3


def launcher_of_groups(folder: Path, machines: Any, stuck: float | None = None) -> _Launcher:
    watch = SimpleNamespace(args={"stuck_seconds": stuck})
    plan = SimpleNamespace(node=lambda name: watch, mesh=SimpleNamespace(world_size=1))
    meeting = SimpleNamespace(keep_open=lambda: None)
    return _Launcher(*cast("Any", (plan, 1, folder, "", meeting, machines, 60.0, None)))


@pytest.mark.parametrize(("starts", "pauses"), [
    ([(1, False), (1, False), (1, False)], [1.0, 2.0, None]),
    ([(1, False), (1, True), (-9, False), (1, False)], [1.0, 1.0, 2.0, None]),
    ([(1, True), (1, True), (1, True)], [1.0, 1.0, 1.0]),
    ([(3, False)], [None]),
    ([(3, True)], [None]),
])  # fmt: skip
def test_a_group_whose_starts_come_to_no_step_is_given_up(tmp_path, monkeypatch, starts, pauses):
    """Exit codes, and whether the start took part in a step; then the seconds before the next start, if any."""
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    launcher = launcher_of_groups(tmp_path, SimpleNamespace(gone_with=lambda process: None))
    (group,) = launcher._groups
    found = []
    for code, joined in starts:
        group.store = SimpleNamespace(check=lambda keys, joined=joined: joined, set=lambda key, value: None)
        rank = SimpleNamespace(poll=lambda code=code: code, wait=lambda: None)
        group.processes = [cast("RankProcess", rank)]
        launcher._ended(group, done=False)
        assert group.due is not None or group.over
        found.append(None if group.over else cast("float", group.due) - 100)
    assert found == pauses


@pytest.mark.parametrize("own_first", [True, False])
def test_a_signal_to_all_machines_counts_once(tmp_path, own_first):
    """Whichever of them hears of it first; a second one is another Ctrl-C."""
    said, sent = [], []
    launcher = launcher_of_groups(tmp_path, SimpleNamespace(look=lambda begun: [*said]))
    rank = SimpleNamespace(poll=lambda: None, send_signal=sent.append)
    launcher._groups[0].processes = [cast("RankProcess", rank)]
    for _ in range(2):
        ways = [lambda: launcher._on_signal(signal.SIGINT, None), lambda: said.append(signal.SIGINT)]
        for way in ways if own_first else reversed(ways):
            way()
            launcher._look()
    assert sent == [signal.SIGINT] * 2


def test_a_rank_whose_heartbeat_stands_still_is_killed(tmp_path, monkeypatch):
    """After more than 15 s without a new line, at a look that is a second after the last one."""
    launcher, sent, killed = launcher_of_groups(tmp_path, SimpleNamespace(), stuck=15.0), [], []
    running = SimpleNamespace(poll=lambda: None, send_signal=sent.append)
    launcher._groups[0].processes = [cast("RankProcess", running)]
    for seconds, born in ((100.0, 1.0), (115.0, 1.0), (116.0, 2.0), (131.0, 2.0), (131.9, 2.0), (132.0, 2.0)):
        beat = SimpleNamespace(alive=1.0, born=born, marks=())
        monkeypatch.setattr(replica_groups, "read_heartbeat", lambda path, beat=beat: beat)
        monkeypatch.setattr(time, "monotonic", lambda seconds=seconds: seconds)
        launcher._look_for_frozen()
        killed.append(list(sent))
    assert killed == [[]] * 5 + [[signal.SIGKILL]]
