"""What the Plan and the Ranks screen say of runs, against the files of those runs."""

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from made_runs import Shape, made_run

from xtrain.text.units import brief, size
from xtrain.tui.model.board import Board
from xtrain.tui.model.rank_reader import RankReader
from xtrain.tui.model.reader import RunReader
from xtrain.tui.pages import plan_rows as plan_facts
from xtrain.tui.pages import rank_figures as rank_facts
from xtrain.tui.pages.plan_view import PlanView
from xtrain.tui.pages.plan_view import page as plan_page
from xtrain.tui.pages.rank_view import RankView
from xtrain.tui.pages.rank_view import page as rank_page
from xtrain.tui.pages.sheet import plain


def read(directory: Path) -> Board:
    reader = RunReader(directory)
    board = reader.poll(5.0)
    for _ in range(3):
        board = reader.poll(5.0)
    return board


def of_ranks(directory: Path) -> dict[int, dict[str, Any]]:
    """The newest line of every rank."""
    return {
        int(path.stem): json.loads(path.read_text().splitlines()[-1]) for path in (directory / "ranks").glob("*.jsonl")
    }


@pytest.mark.parametrize("shape", ["dense", "pipeline"])
def test_nodes_and_their_times_are_those_of_the_files(tmp_path: Path, shape: Shape) -> None:
    made_run(tmp_path, shape, end="running", logged=20, slow={1: 1.3})
    facts = plan_facts.PlanFactRows().of(read(tmp_path))
    assert facts is not None
    shown = [plain(row)[2:] for row in plan_page(facts, PlanView(), 100, 300).rows]
    plan, metrics_of = json.loads((tmp_path / "plan.json").read_text()), of_ranks(tmp_path)
    for node in plan["graph"]["nodes"]:
        line = next(line for line in shown if line.lstrip("✓▶ ").startswith(f"{node['id']} "))
        if node["kind"] != "step":
            continue
        seconds = [record["node_seconds"][node["id"]] for record in metrics_of.values()]
        assert f" {brief(max(seconds))} " in line and f" {brief(median(seconds))} " in line
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    for event in events:
        if event["event"] in ("setup", "checkpoint", "eval"):
            line = next(line for line in shown if line.lstrip("✓▶ ").startswith(f"{event['node']} "))
            assert f" {brief(event['seconds'])} " in line


def test_numbers_of_ranks_are_those_of_their_files(tmp_path: Path) -> None:
    made_run(tmp_path, "experts", end="running", logged=20, slow={2: 1.5})
    facts = rank_facts.RankFactRows().of(read(tmp_path))
    assert facts is not None
    lines = [plain(row) for row in rank_page(facts, RankView(shows="table"), 200, 40).rows]
    for rank, metrics in of_ranks(tmp_path).items():
        line = next(line for line in lines if line[1:].split()[:1] == [str(rank)])
        for text in (
            brief(metrics["step_seconds"]),
            brief(metrics["data_seconds"]),
            brief(metrics["comm_seconds"]),
            size(metrics["memory_bytes"]),
        ):
            assert f" {text} " in line
    assert lines[1].startswith("rank 2 works ") and "% longer than the others" in lines[1]


def test_a_run_whose_ranks_are_gone_says_so(tmp_path: Path) -> None:
    made_run(tmp_path, "experts", end="killed", logged=20)
    for path in (tmp_path / "ranks").glob("*.beat"):  # as if that had been a minute ago
        beat = json.loads(path.read_text())
        path.write_text(json.dumps(beat | {"time": beat["time"] - 60}).ljust(639) + "\n")
    facts = rank_facts.RankFactRows().of(read(tmp_path))
    assert facts is not None
    rows = [plain(row) for row in rank_page(facts, RankView(), 80, 24).rows]
    assert rows[1].startswith("4 ranks are gone: 0–3") and "✗ gone" in "\n".join(rows)


@pytest.mark.parametrize("end", ["waiting", "starting", "done", "stopped", "failed"])
def test_runs_at_every_point_of_their_life(tmp_path: Path, end: Any) -> None:
    made_run(tmp_path, "dense", end=end, logged=20)
    board = read(tmp_path)
    plan, ranks = plan_facts.PlanFactRows().of(board), rank_facts.RankFactRows().of(board)
    assert plan is not None
    for width, height in ((200, 46), (60, 16)):
        assert len(plan_page(plan, PlanView(), width, height).rows) == height
        if ranks is not None:
            rows = [plain(row) for row in rank_page(ranks, RankView(), width, height).rows]
            assert len(rows) == height
            assert ("failed: RuntimeError: boom" in rows[1]) == (end == "failed")
            assert end not in ("done", "stopped") or rows[1].startswith(f"the run has ended: {end}")


def test_where_waiting_is_not_measured_nobody_is_called_slow(tmp_path: Path) -> None:
    """On GPUs a rank that is late is seen in the step time of all: its own is no longer than theirs."""
    made_run(tmp_path, "experts", end="running", logged=20, slow={2: 1.5}, device="cuda")
    board = read(tmp_path)
    assert board.ranks[2].step_seconds and board.ranks.stragglers() == ()
    assert [each.busy_seconds for each in board.ranks] == [None] * 4
    facts = rank_facts.RankFactRows().of(board)
    assert facts is not None
    shown = {shows: rank_page(facts, RankView(shows=shows), 200, 60).rows for shows in ("map", "table", "rank")}
    texts = {shows: "\n".join(map(plain, rows)) for shows, rows in shown.items()}
    assert "all ranks make progress; slow ranks are not detected (GPUs, compiled blocks)" in texts["map"]
    for text in texts.values():
        assert "own work" not in text and "comm" not in text.replace("communicat", "")


def test_a_rank_that_is_alone_waits_for_nobody(tmp_path: Path) -> None:
    run = made_run(tmp_path, "dense", end="waiting")
    run.plan["world_size"] = 1
    line = run.own(0, 1)
    del line["comm_seconds"]
    run.append("ranks/00000.jsonl", line)
    reader = RankReader(tmp_path)
    reader.poll(1, None, 0, 0.0)
    assert reader.ranks()[0].busy_seconds == line["step_seconds"]
