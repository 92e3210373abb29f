"""Who is named where nothing gets on, by whom, and when that is over."""

import json
from pathlib import Path

import pytest
from beats import reading
from msgspec.structs import asdict, replace

from xtrain.records.names import heartbeat_path
from xtrain.records.status import read_heartbeat
from xtrain.runtime.observe.detectors import Finding, Stalled
from xtrain.runtime.observe.judge import Pace

LIMIT = 60.0


class Ranks:
    """Lines of three ranks on a disk; `alive` are those whose line moves on."""

    def __init__(self, folder: Path) -> None:
        (folder / "ranks").mkdir()
        self.folder, self.lines = folder, {rank: reading(rank) for rank in range(3)}
        self.silent: set[int] = set()
        self.write()

    def write(self) -> None:
        for rank, line in self.lines.items():
            heartbeat_path(self.folder, rank).write_text(json.dumps(asdict(line)))

    def later(self, now: float) -> None:
        for rank in self.lines.keys() - self.silent:
            self.lines[rank] = replace(self.lines[rank], alive=900 + int(now))
        self.write()

    def watch(self, rank: int, seconds: int = 90, idle_from: float = 0.0, *, lasting: bool = False) -> list[Finding]:
        """What a rank tells that looks once a second and makes no mark."""
        sign, found = Stalled(rank, 3, self.folder, LIMIT), []
        for now in range(seconds):
            self.later(now)
            found.append(sign.look(Pace(float(now), max(0.0, now - idle_from), lasting)))
        found.append(sign.look(Pace(seconds + 1.0, 0.0, lasting)))
        return [each for each in found if each is not None]


@pytest.fixture
def ranks(tmp_path):
    return Ranks(tmp_path)


def test_a_rank_that_is_stopped_is_named_by_the_first_and_the_end_is_reported(ranks):
    ranks.silent = {1}
    raised, cleared = ranks.watch(0)
    assert (raised.kind, raised.state, raised.ranks, raised.limit) == ("stalled", "raised", (1,), LIMIT)
    assert raised.value is not None and LIMIT <= raised.value < LIMIT + 10
    assert "rank 1 without a heartbeat; the other ranks wait in step 7, step.agree; process 11 on a" in raised.message
    assert cleared.state == "cleared"
    assert ranks.watch(2) == [], "one tells for all"


def test_a_rank_that_got_stuck_is_named_with_the_place(ranks):
    ranks.lines[2] = reading(2, within=2, node="step.fetch", place="data/own.py:80 next")
    raised, _ = ranks.watch(0)
    assert raised.ranks == (2,) and "rank 2 got stuck in step 7, step.fetch at data/own.py:80 next" in raised.message


def test_of_a_rank_that_went_silent_elsewhere_both_places_are_reported(ranks):
    ranks.silent, ranks.lines[1] = {1}, reading(1, step=6, node="step.clip")
    assert "the other ranks wait in step 7, step.agree; last seen in step 6, step.clip" in ranks.watch(0)[0].message


def test_the_first_rank_is_reported_by_the_next_one(ranks):
    ranks.silent = {0}
    raised, _ = ranks.watch(1)
    assert raised.ranks == (0,)
    assert ranks.watch(2) == []


def test_work_that_may_last_is_no_alert(ranks):
    assert ranks.watch(0, lasting=True) == []


def test_before_the_limit_nothing_is_said(ranks):
    ranks.silent = {1}
    assert ranks.watch(0, seconds=59) == []
    assert ranks.watch(0, seconds=90, idle_from=40.0) == []


def test_who_gets_on_reads_nothing(ranks, monkeypatch):
    monkeypatch.setattr("xtrain.runtime.observe.detectors.read_heartbeat", lambda path: pytest.fail("read"))
    assert Stalled(0, 3, ranks.folder, LIMIT).look(Pace(100.0, 10.0, False)) is None


def test_a_rank_that_is_not_to_report_reads_the_line_of_the_first_alone(ranks, monkeypatch):
    read: set[str] = set()
    original = read_heartbeat
    monkeypatch.setattr(
        "xtrain.runtime.observe.detectors.read_heartbeat", lambda path: (read.add(path.name), original(path))[1]
    )
    ranks.watch(2)
    assert read == {"00000.beat"}
