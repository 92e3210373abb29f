"""Names of machines that do not resolve, or that lead elsewhere: reported within seconds, and not needed by one."""

import gc
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from xtrain.cli.main import main
from xtrain.runtime.base import hosts as reaching
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.hosts import NodePlace, check_own_name, reach
from xtrain.runtime.jobs import launch as leftovers
from xtrain.runtime.jobs import rendezvous as meeting
from xtrain.runtime.jobs.launch import Ended, StopNotes, launch
from xtrain.runtime.jobs.machines import FirstNode
from xtrain.runtime.jobs.rendezvous import CannotTakePart, RendezvousHost, RendezvousMember
from xtrain.runtime.loop.preflight import check_world
from xtrain.runtime.observe.stopping import stop_signals

FAILS = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")


@pytest.fixture
def names(monkeypatch) -> dict[str, str]:
    """Addresses by name; no other name resolves, nor does that of this machine."""
    known: dict[str, str] = {}
    real = socket.getaddrinfo

    def resolve(host, port, *given, **named):
        if host is None or host == "localhost" or not any(letter.isalpha() for letter in host):
            return real(host, port, *given, **named)
        if host not in known:
            raise FAILS
        return real(known[host], port, *given, **named)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket, "gethostname", lambda: "me")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    return known


@pytest.mark.parametrize(("address", "meet", "says"), [
    (None, "10.0.0.1", "`me`: the name does not resolve: Temporary failure"),
    ("127.0.1.1", "first", "`me`: the name resolves to 127.0.1.1, which is only known on this machine"),
    ("192.0.2.7", "first", "`me`: the name resolves to 192.0.2.7, which is not an address of this machine"),
    (None, "127.0.0.1", None),  # a single machine
    (None, "localhost", None),
])  # fmt: skip
def test_an_own_name_by_which_no_other_machine_comes(names, address, meet, says):
    if address:
        names["me"] = address
    if says is None:
        check_own_name(meet)
        return
    with pytest.raises(EnvironmentFault) as fault:
        check_own_name(meet)
    assert fault.value.code == "X732" and says in str(fault.value) and "GLOO_SOCKET_IFNAME" in str(fault.value)


def test_an_own_name_that_others_can_use(names, monkeypatch):
    names["me"] = "192.0.2.7"
    monkeypatch.setattr(reaching, "_is_own", lambda address: address == "192.0.2.7")
    check_own_name("first")


def test_an_interface_that_the_user_has_chosen_is_not_questioned(names, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    check_own_name("first")


@pytest.fixture
def hurried(monkeypatch) -> None:
    monkeypatch.setattr(reaching, "NAME_NOTE_SECONDS", 0.0)
    monkeypatch.setattr(reaching, "NAME_SECONDS", 0.3)


def test_a_wait_for_a_name_is_reported_and_ends(names, hurried, capsys):
    with pytest.raises(socket.gaierror):
        reach("first", 1, 3600, note="rank 1 of 2 waits for the first rank")
    said = "rank 1 of 2 waits for the first rank at first:1: the name does not resolve: Temporary failure in name "
    assert capsys.readouterr().err == f"note: {said}resolution\n"


def test_a_name_that_comes_later_is_waited_for(names, hurried):
    """As of a pod, whose name is published a while after it has started."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        looked: list[str] = []

        def later() -> bool:
            looked.append("")
            if len(looked) == 3:
                names["first"] = "127.0.0.1"
            return False

        assert reach("first", server.getsockname()[1], 3600, stopped=later) and len(looked) == 3


def test_a_first_machine_whose_name_leads_nowhere_is_reported(names, hurried):
    with pytest.raises(EnvironmentFault, match="machines cannot meet at first:0: the name does not resolve") as fault:
        FirstNode.open(SimpleNamespace(id="p"), NodePlace(index=0, host="first", port=0))  # pyright: ignore
    assert fault.value.code == "X716"


@pytest.fixture
def rank(names, hurried, monkeypatch):
    """Makes this process a rank of two at a free port of a machine whose name does not resolve."""
    monkeypatch.setattr(meeting, "NAME_SECONDS", 0.3)
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    def become(number: int, **more: str) -> None:
        place = {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "first", "MASTER_PORT": str(port), **more}
        for name, value in place.items():
            monkeypatch.setenv(name, value)

    return become


@pytest.mark.parametrize("number", [0, 1])
def test_ranks_of_a_place_whose_name_does_not_resolve_say_so(rank, number):
    rank(number)
    with pytest.raises(CannotTakePart, match=r"at first:[0-9]*: the name does not resolve") as fault:
        RendezvousMember.arrive() if number else RendezvousHost.open()
    assert fault.value.code == "X716"


def test_a_launcher_of_one_machine_needs_no_name(names, monkeypatch, tmp_path, recwarn):
    """Neither it nor its ranks, which get an address; and it leaves no warning of torch's behind."""
    (tmp_path / "rank.py").write_text("import os; open(os.environ['RANK'], 'w').write(os.environ['MASTER_ADDR'])")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket, "getfqdn", lambda name="": "me")
    monkeypatch.setattr(leftovers, "rank_command", lambda directory, launcher: [sys.executable, "rank.py"])
    handlers = {number: signal.getsignal(number) for number in stop_signals()}
    try:
        ended = launch(tmp_path, "start", ranks=2, stop_seconds=1.0, notes=StopNotes())
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert ended == Ended()
    gc.collect()
    assert not [each.message for each in recwarn if each.category is ResourceWarning]
    assert [(tmp_path / rank).read_text() for rank in ("0", "1")] == ["127.0.0.1"] * 2


def test_ranks_of_one_machine_need_no_name(rank):
    rank(0, LOCAL_WORLD_SIZE="2", LOCAL_RANK="0")
    assert RendezvousHost.open().number == 1
    assert os.environ["MASTER_ADDR"] == "127.0.0.1"


# Variables of another launcher, or left over -------------------------------------------------------------------------

PLACE = {"MASTER_ADDR": "first", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        (
            {"RANK": "1", "WORLD_SIZE": "2"},
            "note: this process is rank 1 of 2, by RANK=1, WORLD_SIZE=2, MASTER_ADDR=first and MASTER_PORT=29500 in "
            "the environment; it waits for rank 0 at first:29500; if no launcher has set these variables, unset them",
        ),
        ({"RANK": "0", "WORLD_SIZE": "3"}, "it waits for 2 other ranks at first:29500; if no"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "and MASTER_PORT=29500 in the environment; if no launcher"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, None),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "error[X703]: invalid rank in the environment: RANK=2, WORLD_SIZE=2; RANK"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "error[X703]: invalid rank in the environment: RANK=one, WORLD_SIZE=2;"),
        ({"RANK": "0", "WORLD_SIZE": "", "LOCAL_RANK": "x"}, "RANK=0, WORLD_SIZE=, LOCAL_RANK=x; RANK must be"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "abc"}, "error[X703]: invalid MASTER_PORT=abc in the"),
    ],
)
def test_what_was_taken_from_the_environment_is_said_first(monkeypatch, tmp_path, capsys, environment, says):
    """Before torch is imported, and before anything is waited for."""
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**PLACE, **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("xtrain.cli.started.join", lambda: 0)
    monkeypatch.setattr("xtrain.cli.started.lead", lambda *given, **named: 0)
    code = main(["run", str(tmp_path / "none.xtrain")])
    said = capsys.readouterr().err
    assert code == (3 if says and "X703" in said else 0)
    assert said == "" if says is None else says in said


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"RANK": "1"}, "RANK=1 but no WORLD_SIZE and no MASTER_ADDR: this process is not a rank"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK=0 and WORLD_SIZE=2 but no MASTER_ADDR: this"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"MASTER_PORT": "29500"}, None),
    ],
)
def test_variables_that_do_not_make_a_rank_are_named(monkeypatch, tmp_path, capsys, environment, says):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["run", str(tmp_path / "none.xtrain")]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"note: the environment has {says}") if says else "the environment has" not in said


def test_a_rank_that_waits_says_so_within_two_seconds_of_processor_time(tmp_path):
    """As a user sees it: the first rank never comes."""
    place = {**PLACE, "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LOCAL_", "TORCHELASTIC"))}
    command = [sys.executable, "-m", "xtrain", "run", "none.xtrain"]
    process = subprocess.Popen(command, cwd=tmp_path, env={**kept, **place}, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("note: this process is rank 1 of 2, by RANK=1")
        times = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        assert sum(map(int, times)) < 2 * os.sysconf("SC_CLK_TCK")
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("local", [None, "0"])
def test_a_world_of_another_size_names_the_variables(monkeypatch, local):
    for name, value in {**PLACE, "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local:
        monkeypatch.setenv("LOCAL_RANK", local)
    plan = SimpleNamespace(mesh=SimpleNamespace(world_size=2, ranks_per_node=2))
    with pytest.raises(EnvironmentFault) as fault:
        check_world(plan, 1)  # pyright: ignore
    says = (
        "the plan is for 2 ranks, but 1 was started, by RANK=0, WORLD_SIZE=1, MASTER_ADDR=first and MASTER_PORT=29500"
    )
    assert says in str(fault.value) and ("unset these variables" in str(fault.value)) == (local is None)
