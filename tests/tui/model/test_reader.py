"""A run's directory as a board: live, damaged, replaced, removed, and a million lines long."""

import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from made_runs import MadeRun, made_run
from read_records import reduce_all

from xtrain.records.lines import as_object
from xtrain.tui.model import metrics as metrics_module
from xtrain.tui.model.board import Board
from xtrain.tui.model.metrics import Metrics
from xtrain.tui.model.reader import RunReader
from xtrain.tui.model.series import Series
from xtrain.tui.state import RunState


def read(reader: RunReader) -> Board:
    """Polls until everything is read."""
    for _ in range(1000):
        board = reader.poll(1.0)
        if board.loading is None:
            return board
    raise AssertionError("never read to the end")


def in_file(run: MadeRun, key: str) -> list[tuple[int, float]]:
    """What stands in metrics.jsonl of a key."""
    lines = (run.directory / "metrics.jsonl").read_text().splitlines()
    return [(record["step"], record[key]) for line in lines if key in (record := json.loads(line))]


def drawn(board: Board, key: str) -> list[tuple[int, float]]:
    x, y = board.series.xy(key)
    return list(zip(x.tolist(), y.tolist(), strict=True))


@pytest.mark.parametrize("shape", ["dense", "experts", "datasets"])
def test_numbers_are_those_of_the_files(tmp_path: Path, shape) -> None:
    run = made_run(tmp_path / "run", shape, logged=40)
    board = read(RunReader(run.directory))
    keys = set(run.metrics(1)) - {"step", "time", "phase"}
    keys = {key for key in keys if not key.startswith("moe/load/")} | {f"eval/{name}/loss" for name in run.datasets}
    assert set(board.series.keys) == keys
    for key in keys:
        assert drawn(board, key) == in_file(run, key)
    last = json.loads((run.directory / "metrics.jsonl").read_text().splitlines()[-2])
    assert as_object(board.series.last).items() >= last.items()
    assert board.life.state == "ended" and board.run.status == "done" and board.loading is None
    assert [rank.step for rank in board.ranks] == [40] * run.world_size
    own = json.loads((run.directory / "ranks/00000.jsonl").read_text().splitlines()[-1])
    assert as_object(board.ranks[0].last) == own and board.ranks[0].node_seconds == own["node_seconds"]
    assert [entry.kind for entry in board.events.entries][-1] == "run_end"
    assert board.events.logs[0].lines[-1] == "a line of a library"


def test_a_run_that_does_not_exist_yet_and_then_begins(tmp_path: Path) -> None:
    reader = RunReader(tmp_path / "runs" / "a" / "b")
    assert reader.poll().life.state == "waiting"
    run = made_run(tmp_path / "runs" / "a" / "b", end="waiting")
    board = reader.poll()
    assert board.planned is not None and board.planned.content == run.plan
    run.begin()
    assert reader.poll().life.state == "training"
    run.log(1, 3)
    board = reader.poll()
    assert len(board.series) == 3 and board.run.step == 3
    version = board.version
    assert reader.poll().version == version, "nothing is new"
    run.log(4, 4)
    board = reader.poll()
    assert board.version > version and board.series.latest("loss") == in_file(run, "loss")[-1][1]


def test_a_stream_cut_after_every_byte_ends_as_the_whole_one(tmp_path: Path) -> None:
    """Files that grow byte by byte: half a line is never taken for a record, and none is taken twice or left out."""
    run = made_run(tmp_path / "run", logged=4)
    contents = {name: (run.directory / name).read_bytes() for name in ("metrics.jsonl", "events.jsonl")}
    whole = read(RunReader(run.directory))
    growing = tmp_path / "growing"
    growing.mkdir()
    reader = RunReader(growing)
    steps = 0
    for name, content in contents.items():
        with (growing / name).open("wb", buffering=0) as file:
            for place in range(len(content)):
                file.write(content[place : place + 1])
                if name == "metrics.jsonl" or place % 7 == 0:
                    board = reader.poll(0.0)
                    ended = content[: place + 1].count(b"\n")
                    assert board.damaged == 0
                    if name == "metrics.jsonl":
                        assert steps <= len(board.series) <= ended
                        steps = len(board.series)
    board = read(reader)
    assert drawn(board, "loss") == drawn(whole, "loss") == in_file(run, "loss")
    assert [entry.event for entry in board.events.entries] == [entry.event for entry in whole.events.entries]
    assert board.run.status == whole.run.status == "done"


def test_a_file_cut_at_every_byte_is_read_up_to_there(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", logged=1)
    content = (run.directory / "metrics.jsonl").read_bytes()
    path = tmp_path / "cut.jsonl"
    for place in range(len(content) + 1):
        path.write_bytes(content[:place])
        follower = Metrics(path, Series())
        found = follower.poll(0.0)
        assert found == [json.loads(line) for line in content[:place].split(b"\n")[:-1]]
        assert len(follower.series) == len({record["step"] for record in found}) and follower.damaged == 0


def test_damaged_lines_are_counted_and_cost_only_themselves(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", end="running", logged=3)
    with (run.directory / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step":4,"lo\n[1,2]\n\xff\xfe\n{"step":5,"time":1,"loss":NaN}\n\n"text"\n')
    run.log(6, 6)
    board = read(RunReader(run.directory))
    assert board.damaged == 4
    assert [step for step, _ in drawn(board, "loss")] == [1, 2, 3, 6] and len(board.series) == 5


def test_numbers_without_a_word_in_json(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", end="running", logged=2)
    run.append("metrics.jsonl", run.metrics(3, loss="nan", grad_norm="inf"), run.metrics(4))
    board = read(RunReader(run.directory))
    assert [step for step, _ in drawn(board, "loss")] == [1, 2, 4]
    assert len(drawn(board, "tokens")) == 4


@pytest.mark.parametrize("chunk", [1 << 10, 512 << 10])
def test_a_run_that_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Another file lies in the place of the old one: what both have in common is not read again."""
    monkeypatch.setattr(metrics_module, "CHUNK", chunk)
    run = made_run(tmp_path / "run", end="running", logged=100)
    reader = RunReader(run.directory)
    board = read(reader)
    seen = board.run.history.num_seen
    run.roll_back(60)
    board = read(reader)
    assert drawn(board, "loss") == in_file(run, "loss") and len(board.series) == 60
    assert board.run.step == 60 and board.run.num_rollbacks == 1
    assert board.series.last.step == 60 and board.series.latest("loss") == in_file(run, "loss")[-1][1]
    run.start += 1000.0
    run.log(61, 70)
    board = read(reader)
    assert drawn(board, "loss") == in_file(run, "loss") and board.run.step == 70
    assert board.run.history.num_seen == seen + 10, "records that were kept are not taken for new ones"


def test_a_run_that_is_gone_on_with(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", end="stopped", logged=20)
    reader = RunReader(run.directory)
    assert read(reader).life.status == "stopped"
    run.attempt, run.start = 2, run.start + 500.0
    run.run_start(resumed_step=20)
    with run.alive():
        board = read(reader)
        assert board.life.state == "starting" and board.life.status == "" and board.run.step == 20
        run.event("setup_done", seconds=1.0)
        run.log(21, 25)
        board = read(reader)
    assert board.life.state == "training" and len(board.series) == 25


def test_another_run_in_the_same_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "CHUNK", 1 << 10)  # so that the files could be taken for the same up to there
    run = made_run(tmp_path / "run", "dense", logged=50)
    reader = RunReader(run.directory)
    assert len(read(reader).series) == 50
    run.directory.rename(tmp_path / "run~before")
    other = made_run(run.directory, "experts", logged=8, start=run.start + 10_000, end="starting")
    board = read(reader)
    assert board.run.start is not None and board.run.start.name == "moe_cpu"
    assert len(board.events.entries) == 2 and board.run.step == 0 and board.life.state == "starting"
    other.append("metrics.jsonl", *(other.metrics(step, loss=step / 7) for step in range(1, 61)))
    board = read(reader)
    assert drawn(board, "loss") == in_file(other, "loss") and len(board.ranks) == 4
    assert board.planned is not None and board.planned.name == "moe_cpu"


def test_a_directory_that_is_removed_and_comes_back(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", end="running", logged=10)
    reader = RunReader(run.directory)
    before = read(reader)
    shutil.rmtree(run.directory)
    after = reader.poll()
    assert drawn(after, "loss") == drawn(before, "loss") and after.planned == before.planned
    assert after.run == before.run and after.ranks[1].last == before.ranks[1].last
    made_run(run.directory, end="running", logged=12, start=run.start + 10_000)
    assert len(read(reader).series) == 12


def test_files_that_may_not_be_read(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "events.jsonl", "plan.json", "ranks", "logs/a.log"):
        path = tmp_path / "run" / name
        path.mkdir(parents=True)
    (tmp_path / "run" / "ranks").rmdir()
    (tmp_path / "run" / "ranks").write_text("no folder")
    board = RunReader(tmp_path / "run").poll()
    assert len(board.series) == 0 and board.planned is None


def test_a_plan_that_is_half_written_is_read_once_it_is_whole(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", end="waiting")
    path = run.directory / "plan.json"
    text = path.read_text()
    path.write_text(text[:1000])
    reader = RunReader(run.directory)
    assert reader.poll().planned is None
    path.write_text(text)
    board = reader.poll()
    assert board.planned is not None and board.planned.content == run.plan


def _long(tmp_path: Path, steps: int) -> MadeRun:
    """A run whose records are long in bytes, not in steps."""
    run = made_run(tmp_path / "run", end="waiting")
    run.begin()
    run.append("metrics.jsonl", *(run.metrics(step, note="x" * 200) for step in range(1, steps + 1)))
    run.step = steps
    return run


def test_a_long_run_is_seen_at_a_glance_and_then_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("BIG", 200_000), ("END", 50_000), ("CHUNK", 50_000), ("SAMPLES", 64)):
        monkeypatch.setattr(metrics_module, name, value)
    steps = 3000
    run = _long(tmp_path, steps)
    reader = RunReader(run.directory)
    board = reader.poll(0.0)
    assert board.loading is not None and board.loading < 0.2
    x, y = board.series.xy("loss")
    losses = dict(in_file(run, "loss"))
    assert x[-1] == steps and (np.diff(x) > 0).all() and len(x) > 100 and x[0] < steps / 30
    assert all(losses[step] == loss for step, loss in zip(x.tolist(), y.tolist(), strict=True))
    assert board.run.step == steps and board.series.last.step == steps
    assert board.series.latest("loss") == losses[steps] and board.run.history.points()[0][0] < steps / 30

    run.log(steps + 1, steps + 5)  # what is new is seen at once, however much is still to be read
    board = reader.poll(0.0)
    assert board.loading is not None and board.series.last.step == steps + 5 == board.run.step
    assert drawn(board, "loss")[-1] == in_file(run, "loss")[-1]

    polls = 0
    while board.loading is not None:
        before, board, polls = board.loading, reader.poll(0.001), polls + 1
        assert board.loading is None or board.loading >= before
        assert (np.diff(board.series.xy("loss")[0]) > 0).all()
    assert polls > 3
    assert drawn(board, "loss") == in_file(run, "loss") and len(board.series) == steps + 5


def test_a_long_run_that_goes_back_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("BIG", 200_000), ("END", 50_000), ("CHUNK", 50_000), ("SAMPLES", 64)):
        monkeypatch.setattr(metrics_module, name, value)
    run = _long(tmp_path, 3000)
    reader = RunReader(run.directory)
    assert reader.poll(0.0).loading is not None
    run.roll_back(2000)
    board = reader.poll(0.0)
    assert board.series.xy("loss")[0][-1] == 2000 and board.series.latest("loss") == in_file(run, "loss")[-1][1]
    board = read(reader)
    assert drawn(board, "loss") == in_file(run, "loss")
    shutil.rmtree(run.directory)
    other = made_run(run.directory, logged=5)
    assert drawn(read(reader), "loss") == in_file(other, "loss")


def test_a_column_that_was_let_go_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "CHUNK", 50_000)
    steps = 3000
    run = _long(tmp_path, steps)
    reader = RunReader(run.directory)
    reader._series._limit = 8 * steps * 5
    board = reader.poll(0.0)
    while board.series.xy("loss")[0].size < steps or board.loading is not None:
        board = reader.poll(0.001)
    gone = sorted(reader._series._gone)
    assert gone
    assert len(board.series.xy(gone[0])[0]) > 0
    run.evaluate()
    read(reader)
    for key in ("loss", gone[0]):
        board.series.xy(key)
    reader._series._asked = {gone[0]: time.monotonic(), "loss": time.monotonic()}
    board = read(reader)
    assert drawn(board, gone[0]) == in_file(run, gone[0])
    run.log(steps + 1, steps + 3)
    board = read(reader)
    assert drawn(board, gone[0]) == in_file(run, gone[0])


def test_events_and_steps_are_taken_in_as_they_happened(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", "datasets", logged=80)
    records = [json.loads(line) for name in (
        "metrics.jsonl", "events.jsonl",
    ) for line in (run.directory / name).read_text().splitlines()]  # fmt: skip
    records.sort(key=lambda record: record["time"])
    assert read(RunReader(run.directory)).run == reduce_all(RunState(), records)


def test_a_poll_without_news_costs_next_to_nothing(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", logged=2000)
    reader = RunReader(run.directory)
    read(reader)
    began = time.process_time()
    for _ in range(200):
        reader.poll()
    assert (time.process_time() - began) / 200 < 0.005


def test_many_ranks_are_looked_at_one_after_the_other(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", "huge", end="running", logged=4)
    reader = RunReader(run.directory)
    board, polls = reader.poll(0.0), 1
    assert len(board.ranks) == 512 and any(rank.step is None for rank in board.ranks)
    while any(rank.step is None or rank.beat is None for rank in board.ranks):
        board, polls = reader.poll(0.0), polls + 1
        assert polls < 100
    assert board.ranks[511].step == 4 and board.ranks[511].beat.pid == os.getpid()


def test_an_end_does_not_overtake_the_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step and the end are written between the looks at one file and at the other."""
    run = made_run(tmp_path / "run", end="running", logged=3)
    reader = RunReader(run.directory)
    read(reader)
    look = reader._events.read

    def late() -> list:
        if run.step == 3:
            run.log(4, 4)
            run.end("done")
        return look()

    monkeypatch.setattr(reader._events, "read", late)
    board = reader.poll()
    assert board.life.status == "done" and board.series.last.step == board.run.history.step == 4


def test_the_step_is_that_of_the_ranks_where_it_is_not_logged(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", end="running", logged=4)
    run.step = 30
    run.beat()
    reader = RunReader(run.directory)
    board = reader.poll(1.0)
    assert (board.run.step, board.step) == (4, 30)
    run.step = 5
    run.end("stopped")
    board = reader.poll(1.0)
    assert board.step == board.run.step == 5
