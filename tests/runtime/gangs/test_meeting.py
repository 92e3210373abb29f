"""Ranks that another launcher starts meet in a store that outlives a start, whatever earlier starts have left in it."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore

from xtrain.runtime.gangs import meeting
from xtrain.runtime.gangs.meeting import CannotTakePart, Dismissed, Door, Guest


class Room:
    """Ranks as threads over one store."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.found: dict[int, Any] = {}
        self._threads: list[threading.Thread] = []

    def start(self, ranks: tuple[int, ...], act: Callable[[Guest], Any]) -> None:
        def run(rank: int) -> None:
            try:
                self.found[rank] = act(Guest.arrive())
            except Dismissed as away:
                self.found[rank] = away.code

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
    made = Room()
    monkeypatch.setattr(meeting, "_store", lambda seconds: PrefixStore("xtrain", made.store))
    monkeypatch.setattr(meeting, "FAREWELL", 0.3)
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "1")
    return made


def speaks(guest: Guest) -> tuple[str, str]:
    """Who the first rank is, as the store of this start knows it."""
    return guest.told["plan"], guest.ready().get("address").decode()


def test_ranks_meet_those_of_their_own_start_only(room):
    """Agents of two machines count their restarts differently, and the store has what every earlier start has left."""
    for _ in (1, 2):
        room.start((9,), lambda guest: "of an earlier start")  # it came, and the first rank was killed
        Door.open()
    for number in (3, 4):
        room.start((1, 2), speaks)
        door = Door.open()
        assert door.number == number
        door.invite(plan=f"plan {number}").set("address", f"first of {number}")
        found = room.end()
        assert found[1] == found[2] == (f"plan {number}", f"first of {number}")


def test_a_first_rank_that_leaves_takes_the_others_along(room):
    room.start((1, 2), speaks)
    Door.open().dismiss(3)
    assert room.end() == {1: 3, 2: 3}
    Door.open().dismiss(2)  # nobody comes: it does not wait for them for long


def test_a_rank_that_cannot_take_part_ends_the_start_for_all(room):
    def act(guest: Guest) -> Any:
        if threading.current_thread().name == "rank 2":
            return speaks(guest)
        guest.cannot("X703", "4 ranks here")
        raise Dismissed(3)

    room.start((1, 2), act)
    with pytest.raises(CannotTakePart, match="rank 1: 4 ranks here") as fault:
        Door.open().invite(plan="plan")
    assert fault.value.code == "X703"
    found = room.end()
    assert (found[1], found[2]) == (3, 3)
