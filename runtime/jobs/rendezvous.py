"""Rendezvous of ranks that another launcher has started, before they have a process group."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final

from attrs import define
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.hosts import ARRIVAL, LOOPBACK, NAME_SECONDS, PATIENCE, reach, words

# Seconds that the first rank waits before it exits, so that the others receive its answer.
SEND_AWAY_SECONDS: Final = 10.0
_PAUSE: Final = 0.02
_ROOM: Final = "xtrain"


class SentAway(Exception):
    """Order of the first rank to exit. code: the exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"leave with exit code {code}")
        self.code = code


class CannotTakePart(EnvironmentFault):
    """Failure of other ranks to take part, each with its reason in the message."""


@define
class RendezvousHost:
    """First rank's side of the rendezvous. number: of this start among those in this store, from 1."""

    _store: Store
    _world: int
    number: int

    @classmethod
    def open(cls) -> "RendezvousHost":
        """Open the store. Raises CannotTakePart if it cannot be reached."""
        with _reaching():
            store = _store()
            return cls(store, int(os.environ["WORLD_SIZE"]), store.add("starts", 1))

    @property
    def name(self) -> str:
        return f"start-{self.number}"

    def admit(self, **answer: Any) -> Store:
        """Admit all other ranks and start once they are ready; return the store of this start.

        Raises CannotTakePart if one of them cannot take part or does not arrive: then none starts.
        """
        with _reaching():
            came = self._admit({"name": self.name, **answer}, ARRIVAL)
            number = self._count("faults")
            faults = [json.loads(self._store.get(f"{self.name}/fault/{n}")) for n in range(1, number + 1)]
            if came < self._world - 1:
                why = f"{came} of the {self._world - 1} other ranks have arrived within {ARRIVAL:g} s: did they start?"
                faults.append([0, "X716", why])
            self._store.set(f"{self.name}/word", str(3 if faults else 0))
        if faults:
            said = "; ".join(f"rank {rank}: {why}" for rank, _, why in sorted(faults))
            raise CannotTakePart(faults[0][1], said)
        return PrefixStore(self.name, self._store)

    def send_away(self, code: int) -> None:
        """Tell all other ranks that arrive within a while to exit."""
        with suppress(CannotTakePart), _reaching():  # they are gone
            self._store.set_timeout(timedelta(seconds=SEND_AWAY_SECONDS))
            self._admit({"name": self.name, "exit_code": code}, SEND_AWAY_SECONDS)

    def _admit(self, answer: dict[str, Any], seconds: float) -> int:
        """Answer arriving ranks until all have arrived or time is up; return their number."""
        text, deadline = json.dumps(answer), time.monotonic() + seconds
        while (came := self._count("came")) < self._world - 1 and time.monotonic() < deadline:
            answered, last = self._store.add("answered", 0), self._store.add("arrivals", 0)
            for number in range(answered + 1, last + 1):
                self._store.set(f"answer/{number}", text)
            if last > answered:
                self._store.add("answered", last - answered)
            time.sleep(_PAUSE)
        return came

    def _count(self, what: str) -> int:
        return self._store.add(f"{self.name}/{what}", 0)


@define
class RendezvousMember:
    """Side of all other ranks. answer: the first rank's data about this start."""

    _store: Store
    answer: dict[str, Any]

    @classmethod
    def arrive(cls) -> "RendezvousMember":
        """Wait for the first rank. Raises SentAway if it sends this one away, CannotTakePart if it does not arrive."""
        with _reaching():
            store = _store()
            key = f"answer/{store.add('arrivals', 1)}"
            answer = json.loads(store.get(key))
        member = cls(store, answer)
        if "exit_code" in answer:
            with suppress(CannotTakePart):  # the first rank exits too
                member._came()
            raise SentAway(answer["exit_code"])
        with _reaching():
            store.delete_key(key)
        return member

    def ready(self) -> Store:
        """Report that this rank is ready, and wait for the start. Raises SentAway if others cannot take part,
        CannotTakePart if the first rank is gone."""
        self._came()
        with _reaching():
            code = int(self._store.get(f"{self.answer['name']}/word"))
        if code:
            raise SentAway(code)
        return PrefixStore(self.answer["name"], self._store)

    def cannot(self, code: str, why: str) -> None:
        """Report why this rank cannot take part: no rank will start. code: of the diagnostic."""
        name = self.answer["name"]
        with _reaching():
            number = self._store.add(f"{name}/faults", 1)
            self._store.set(f"{name}/fault/{number}", json.dumps([int(os.environ["RANK"]), code, why]))
        self._came()

    def _came(self) -> None:
        with _reaching():
            self._store.add(f"{self.answer['name']}/came", 1)


def _store() -> Store:
    """Return the store of the launcher, or else of the first rank, which does not block here for the others: it could
    not handle signals."""
    timeout, rank, world = timedelta(seconds=PATIENCE), os.environ["RANK"], os.environ["WORLD_SIZE"]
    if os.environ.get("LOCAL_WORLD_SIZE") == world:
        os.environ["MASTER_ADDR"] = LOOPBACK  # a single machine needs no name
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    speaks = os.environ.get("LOCAL_RANK", "0") == "0"
    if rank == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        own = {"is_master": True, "multi_tenant": True, "wait_for_workers": False}
        store = TCPStore(LOOPBACK, port, int(world), timeout=timeout, **own)
        reach(host, port, NAME_SECONDS, note=f"rank 0 of {world} cannot reach itself")
        return PrefixStore(_ROOM, store)
    reach(host, port, PATIENCE, note=f"rank {rank} of {world} waits for the first rank" if speaks else "")
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    return PrefixStore(_ROOM, store)


@contextmanager
def _reaching() -> Iterator[None]:
    """Turn errors of a missing or silent store into CannotTakePart."""
    try:
        yield
    except (RuntimeError, ValueError, KeyError, OSError) as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT') or '(no MASTER_PORT)'}"
        what = "the ranks cannot meet" if os.environ["RANK"] == "0" else "the first rank is not there"
        why = words(error)
        message = f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}: {what} at {place}: {why}"
        raise CannotTakePart("X716", message) from None
