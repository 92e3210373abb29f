"""Ranks that another launcher starts meet in a store that outlives a start, whatever earlier starts have left in it."""

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore

from xtrain.runtime.jobs import rendezvous as meeting
from xtrain.runtime.jobs.rendezvous import CannotTakePart, RendezvousHost, RendezvousMember, SentAway


class Room:
    """Ranks as threads over one store."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.found: dict[int, Any] = {}
        self._threads: list[threading.Thread] = []

    def start(self, ranks: tuple[int, ...], act: Callable[[RendezvousMember], Any]) -> None:
        def run(rank: int) -> None:
            try:
                self.found[rank] = act(RendezvousMember.arrive())
            except SentAway as away:
                self.found[rank] = away.code
            except CannotTakePart as fault:
                self.found[rank] = fault

        for rank in ranks:
            thread = threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def end(self) -> dict[int, Any]:
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive(), "a rank waits for ever"
        return self.found


@pytest.fixture
def room(monkeypatch) -> Room:
    opened = Room()
    monkeypatch.setattr(meeting, "_store", lambda: PrefixStore("xtrain", opened.store))
    monkeypatch.setattr(meeting, "SEND_AWAY_SECONDS", 0.3)
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "1")
    return opened


def plan_and_address(member: RendezvousMember) -> tuple[str, str]:
    """Who the first rank is, as the store of this start knows it."""
    return member.answer["plan"], member.ready().get("address").decode()


def test_ranks_meet_those_of_their_own_start_only(room):
    """Agents of two machines count their restarts differently, and the store has what every earlier start has left."""
    for _ in (1, 2):
        room.start((9,), lambda member: "of an earlier start")  # it came, and the first rank was killed
        RendezvousHost.open()
    for number in (3, 4):
        room.start((1, 2), plan_and_address)
        host = RendezvousHost.open()
        assert host.number == number
        host.admit(plan=f"plan {number}").set("address", f"first of {number}")
        found = room.end()
        assert found[1] == found[2] == (f"plan {number}", f"first of {number}")


def test_a_first_rank_that_leaves_takes_the_others_along(room):
    room.start((1, 2), plan_and_address)
    RendezvousHost.open().send_away(3)
    assert room.end() == {1: 3, 2: 3}
    RendezvousHost.open().send_away(2)  # nobody comes: it does not wait for them for long


def test_a_rank_that_cannot_take_part_ends_the_start_for_all(room):
    def act(member: RendezvousMember) -> Any:
        if threading.current_thread().name == "rank 2":
            return plan_and_address(member)
        member.cannot("X703", "4 ranks here")
        raise SentAway(3)

    room.start((1, 2), act)
    with pytest.raises(CannotTakePart, match="rank 1: 4 ranks here") as fault:
        RendezvousHost.open().admit(plan="plan")
    assert fault.value.code == "X703"
    found = room.end()
    assert (found[1], found[2]) == (3, 3)


# Every wait ends -----------------------------------------------------------------------------------------------------


def test_a_first_rank_waits_for_others_no_longer_than_it_says(room, monkeypatch):
    """One comes and is killed before it is ready; the other, which is, hears that it leaves."""
    monkeypatch.setattr(meeting, "ARRIVAL", 0.5)
    room.start((1,), lambda member: "killed")
    room.start((2,), plan_and_address)
    with pytest.raises(CannotTakePart, match=r"1 of the 2 other ranks have arrived within 0\.5 s") as fault:
        RendezvousHost.open().admit(plan="plan")
    assert fault.value.code == "X716"
    assert room.end() == {1: "killed", 2: 3}


@pytest.fixture
def place(monkeypatch) -> None:
    """A port that nobody has, and no launcher that has a store."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("when", ["before it has answered", "before it has given the word"])
def test_ranks_notice_that_the_first_one_has_ended(place, monkeypatch, when):
    """It has the store, where no launcher has one, and does not wait for them in it: that would hear no signal."""
    host = RendezvousHost.open()  # which returns, though nobody has come
    monkeypatch.setenv("RANK", "1")
    room = Room()
    room.start((1,), lambda member: member.ready())
    while host._store.add("arrivals", 0) == 0:
        time.sleep(0.01)
    if when == "before it has given the word":
        host._admit({"name": host.name}, 0.1)
    del host
    (fault,) = room.end().values()
    assert isinstance(fault, CannotTakePart) and fault.code == "X716"
    assert "rank 1 of 3: the first rank is not there at localhost:" in str(fault) and "\n" not in str(fault)


@pytest.mark.parametrize(("rank", "name", "value", "says"), [
    ("0", "MASTER_PORT", None, r"rank 0 of 3: the ranks cannot meet at localhost:\(no MASTER_PORT\)"),
    ("2", "MASTER_PORT", None, "rank 2 of 3: the first rank is not there"),
    ("0", "MASTER_PORT", "many", "rank 0 of 3: the ranks cannot meet at localhost:many"),
    ("2", "MASTER_PORT", "1", "rank 2 of 3: the first rank is not there at localhost:1"),
])  # fmt: skip
def test_a_place_where_nobody_can_meet_is_reported(place, monkeypatch, rank, name, value, says):
    monkeypatch.setattr(meeting, "PATIENCE", 0.5)
    monkeypatch.setenv("RANK", rank)
    if value is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, value)
    with pytest.raises(CannotTakePart, match=says) as fault:
        RendezvousHost.open() if rank == "0" else RendezvousMember.arrive()
    assert fault.value.code == "X716"


def test_a_port_that_another_program_has_is_reported(place, monkeypatch):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        monkeypatch.setenv("MASTER_PORT", str(other.getsockname()[1]))
        with pytest.raises(CannotTakePart, match=r"the ranks cannot meet at localhost:.*EADDRINUSE"):
            RendezvousHost.open()
