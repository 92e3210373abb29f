"""Ranks: which of them hold the others up, and what is read of their files."""

from collections.abc import Collection
from pathlib import Path

import pytest
from attrs import evolve
from made_runs import MadeRun, made_run

from xtrain.records.status import read_heartbeat
from xtrain.tui.model import rank_reader
from xtrain.tui.model.life import OneRank, Ranks
from xtrain.tui.model.rank_reader import RING, RankReader
from xtrain.tui.model.reader import RunReader


def _ranks(*busy: float | None, pp: tuple[int, ...] = ()) -> Ranks:
    return Ranks(world_size=len(busy), all=tuple(OneRank(
        rank=rank,
        busy_seconds=seconds,
        coordinates={"pp": pp[rank]} if pp else {},
    ) for rank, seconds in enumerate(busy)))  # fmt: skip


@pytest.mark.parametrize(("busy", "slow"), [
    ((1.0, 1.0), []),
    ((1.0, 1.3), [1]),
    ((1.0, 1.05), []),
    ((1.0, 1.01, 0.99, 1.5), [3]),
    ((1.0, 2.0, 1.0, 3.0), [3, 1]),
    ((1.0, 1.1, 0.9, 1.2, 0.8, 1.3), []),  # they all vary
    ((1.0, 1.0, 1.0, 0.2), []),  # to be fast is no fault
    ((None, 1.0), []),
    ((0.0, 0.0), []),
    ((1.0,), []),
    ((), []),
])  # fmt: skip
def test_stragglers(busy, slow) -> None:
    assert [each.rank for each in _ranks(*busy).stragglers()] == slow


def test_a_straggler_is_shown_with_what_it_is_compared_with() -> None:
    (slow,) = _ranks(1.0, 1.5, 1.0, 1.0).stragglers()
    assert (slow.seconds, slow.median, slow.share) == (1.5, 1.0, 0.5)


def test_stages_of_a_pipeline_are_not_compared_with_each_other() -> None:
    assert _ranks(1.0, 1.0, 2.0, 2.0, pp=(0, 0, 1, 1)).stragglers() == ()
    assert [each.rank for each in _ranks(1.0, 1.0, 2.0, 2.6, pp=(0, 0, 1, 1)).stragglers()] == [3]


def test_a_rank_that_makes_all_others_wait_is_found_by_what_it_does_not_wait(tmp_path: Path) -> None:
    """All take equally long for a step; three of them spend half of it waiting for the fourth."""
    run = made_run(tmp_path / "run", "experts", end="running", logged=3)
    for rank in range(4):
        record = run.own(rank, 4) | {"step_seconds": 1.0, "comm_seconds": 0.1 if rank == 2 else 0.5}
        run.append(f"ranks/{rank:05d}.jsonl", *(record | {"step": step} for step in range(4, 20)))
    board = RunReader(run.directory).poll(1.0)
    assert [(each.rank, round(each.share, 2)) for each in board.ranks.stragglers()] == [(2, 0.8)]


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", end="running", logged=3)
    run.log(4, 3000, own_lines=2000)
    reader = RankReader(run.directory)
    reader.poll(2, None, 1, 0.0)
    rank = reader.ranks()[0]
    assert rank.step == 3000 and len(rank.recent) <= RING
    assert [step for step, _ in rank.recent] == list(range(3001 - len(rank.recent), 3001))
    run.log(3001, 3001)
    for _ in range(2):
        reader._passes["files"] = (0, -1e9)
        reader.poll(2, None, 1, 0.0)
    assert reader.ranks()[0].step == 3001 and reader.ranks()[0].recent[-1][0] == 3001


def test_a_run_that_goes_back_takes_its_step_times_back(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", end="running", logged=8)
    reader = RankReader(run.directory)
    reader.poll(2, None, 1, 0.0)
    run.step = 4
    run.append("ranks/00000.jsonl", run.own(0, 5))
    reader._passes["files"] = (0, -1e9)
    reader.poll(2, None, 1, 0.0)
    assert [step for step, _ in reader.ranks()[0].recent] == [1, 2, 3, 4, 5]


def test_lines_of_a_start_before_are_no_news_of_this_one(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", end="running", logged=8)
    reader = RankReader(run.directory)
    reader.poll(2, None, 2, 0.0)
    assert [rank.beat for rank in reader.ranks()] == [None, None]
    run.attempt = 2
    run.beat()
    reader._passes["beats"] = (0, -1e9)
    reader.poll(2, None, 2, 0.0)
    assert [rank.pulse for rank in reader.ranks()] == ["alive", "alive"]


def test_a_run_may_go_on_with_fewer_ranks(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", "experts", end="running", logged=8)
    reader = RankReader(run.directory)
    reader.poll(4, None, 1, 0.0)
    before = reader.ranks()
    reader.poll(2, None, 1, 0.0)
    assert len(reader.ranks()) == 2 and reader.ranks()[1].last == before[1].last
    reader.poll(3, None, 1, 0.0)
    assert len(reader.ranks()) == 3 and reader.ranks()[2] == evolve(OneRank(rank=2))


@pytest.mark.parametrize("text", ["", "{", '{"rank":0}', "[]", '{"rank":"0"}', "\xff"])
def test_half_a_line_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.beat"
    path.write_text(text, encoding="latin-1")
    assert read_heartbeat(path) is None
    assert read_heartbeat(tmp_path / "none") is None
    run = made_run(tmp_path / "run", end="running", logged=2)
    reader = RankReader(run.directory)
    reader.poll(2, None, 1, 0.0)
    (run.directory / "ranks/00000.beat").write_text(text, encoding="latin-1")
    reader._passes["beats"] = (0, -1e9)
    reader.poll(2, None, 1, 0.0)
    assert reader.ranks()[0].beat is not None and reader.ranks()[0].pulse == "alive"


class Looks:
    """A reader of four ranks whose disk lets it look at them once in a while."""

    def __init__(self, run: MadeRun, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.reader, self.run = 1000.0, RankReader(run.directory), run
        monkeypatch.setattr(rank_reader, "AT_LEAST", 1)
        monkeypatch.setattr(rank_reader.time, "monotonic", lambda: self.now)

    def through(self, seconds: float, beats: Collection[int]) -> list[str]:
        """Lines of some ranks move, and all are looked at once more, which takes so long."""
        self.run.beat(beats)
        for _ in range(4):
            self.reader.poll(4, None, 1, 0.0)
            self.now += seconds / 4
        return [each.pulse for each in self.reader.ranks()]


def test_a_rank_that_is_seldom_looked_at_is_not_silent_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = Looks(made_run(tmp_path / "run", "experts", end="running", logged=2), monkeypatch)
    for _ in range(3):
        assert looks.through(40.0, range(4)) == ["alive"] * 4
    assert looks.reader.ranks().seconds_old == 30
    assert looks.through(40.0, (0, 1, 2)) == ["alive"] * 4  # one look may have come just before it moved
    assert looks.through(40.0, (0, 1, 2)) == ["alive", "alive", "alive", "silent"]
    assert looks.through(40.0, range(4)) == ["alive"] * 4


def test_a_disk_that_shows_changes_late_makes_no_rank_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(made_run(tmp_path / "run", "experts", end="running", logged=2), monkeypatch)
    for place in range(40):
        seen = looks.through(1.0, range(4) if place % 4 == 0 else ())
    assert seen == ["alive"] * 4 and looks.reader.ranks().seconds_old == 0
    assert [looks.through(1.0, ()) for _ in range(12)][-1] == ["silent"] * 4
