"""The first screen: its figures are those of the files, and it says how a run ended."""

import json
import re
from pathlib import Path

import pytest
from dashboards import opened, played, rows, shown, until
from made_runs import MadeRun, made_run

from xtrain.tui.board.head import stretches, upcoming, when
from xtrain.tui.model.board import Board
from xtrain.tui.model.reader import RunReader
from xtrain.tui.pages.figures import comparison, figures

UNITS = {"": 1, "k": 1e3, "M": 1e6, "B": 1e9, "ms": 1e-3, "s": 1, "%": 0.01, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
SHOWN = re.compile(r"(?P<number>-?[\d,.]+(?:e[+-]\d+)?)\s*(?P<unit>[A-Za-z%]*)")


def agrees(text: str, value: float) -> bool:
    """Whether a figure, as it is shown, is `value` rounded to the digits that are shown."""
    found = SHOWN.match(text)
    assert found, text
    plain, unit = found["number"].replace(",", ""), UNITS[found["unit"]]
    mantissa, _, exponent = plain.partition("e")
    decimals = len(mantissa.partition(".")[2])
    last_digit = 10.0 ** (int(exponent or 0) - decimals) * unit
    return abs(float(plain) * unit - value) <= 0.5000001 * last_digit


def board_of(run: MadeRun) -> Board:
    reader = RunReader(run.directory)
    board = reader.poll(10)
    while board.loading is not None:
        board = reader.poll(10)
    return board


@pytest.mark.parametrize("last", [1, 63, 250, 9_999])
def test_figures_are_those_of_the_last_record(tmp_path, last):
    run = made_run(tmp_path / "run", end="running", logged=0, steps=20_000)
    run.log(last, last)
    record = run.metrics(last, mfu=0.41234)
    run.append("metrics.jsonl", record | {"step": last + 1})
    run.step = last + 1
    run.evaluate()
    board, shares = board_of(run), ("data_seconds", "comm_seconds")
    said = dict(figures(board))
    for name, key in {"loss": "loss", "grad norm": "grad_norm", "lr": "lr", "tokens/s": "tokens_per_second"}.items():
        assert agrees(said[name], record[key]), (name, said[name], record[key])
    assert agrees(said["MFU"], 0.41234)
    for name, key in zip(("data wait", "comm, most"), shares, strict=True):
        assert agrees(said[name], record[key] / record["step_seconds"])
    event = json.loads((run.directory / "events.jsonl").read_text().splitlines()[-1])
    assert run.datasets == ["library"] and agrees(said["eval libr…"], event["loss"])


def test_an_objective_that_is_not_the_loss_has_a_figure_and_a_curve(tmp_path):
    run = made_run(tmp_path / "run", end="running", logged=0, steps=90)
    run.append("metrics.jsonl", *(run.metrics(step, objective=3.25 - step / 100) for step in range(1, 9)))
    run.step = 8
    assert dict(figures(board_of(run)))["objective"] == "3.1700"

    async def play():
        async with opened(run.directory, (80, 30)) as (app, _):
            assert "objective 3.1700" in shown(app) and re.search("^loss .*objective 3.17", shown(app), re.MULTILINE)
            run.append("metrics.jsonl", run.metrics(9, objective=run.metrics(9)["loss"]))
            assert "objective" not in dict(figures(board_of(run)))

    played(play())


def test_of_several_evaluations_none_stands_for_the_others(tmp_path):
    board = board_of(made_run(tmp_path / "run", "datasets", end="running", logged=20))
    assert len(board.run.evaluations) > 1 and dict(figures(board))["eval loss"] == "3 sets"


def test_what_was_planned_is_that_of_the_plan(tmp_path):
    run = made_run(tmp_path / "run", "large", end="running", logged=20, every=5)
    plan, board = run.plan, board_of(run)
    said = {row.name: row for row in comparison(board)}
    times = plan["estimates"]["times"]
    assert agrees(said["step time"].planned, times["step"])
    assert agrees(said["tokens/s"].planned, times["tokens_per_second"])
    assert agrees(said["MFU"].planned, times["mfu"])
    assert agrees(said["tokens"].planned, plan["timeline"]["tokens"])
    assert agrees(said["steps"].planned, plan["timeline"]["steps"])
    fullest = max(rank["allocated_bytes"] for rank in plan["memory"]["per_rank"])
    memory = next(row for name, row in said.items() if name.startswith("memory"))
    assert agrees(memory.planned, fullest)
    record = run.metrics(20)
    assert agrees(said["step time"].actual, record["step_seconds"])
    assert agrees(memory.actual, record["memory_bytes"])
    assert said["step time"].off == pytest.approx(record["step_seconds"] / times["step"] - 1)


def test_what_nobody_knows_is_said(tmp_path):
    board = board_of(made_run(tmp_path / "run", end="waiting"))
    assert dict(figures(board))["loss"] == "–" and dict(figures(board))["MFU"] == "n/a"
    assert {row.planned for row in comparison(board)} >= {"n/a"}
    assert all(row.off is None for row in comparison(board))


def test_the_groups_that_take_part(tmp_path):
    run = made_run(tmp_path / "run", end="running", logged=10)
    assert "groups in" not in {row.name for row in comparison(board_of(run))}
    run.event("replicas", step=10, taking_part=[0, 2], joined=[], left=[1], of=3, rows=8)
    row = comparison(board_of(run))[-1]
    assert (row.name, row.actual, row.planned, row.off) == ("groups in", "0, 2", "3", pytest.approx(-1 / 3))


def test_a_difference_of_memory_on_a_cpu_says_nothing(tmp_path):
    rows_of = comparison(board_of(made_run(tmp_path / "run", logged=10)))
    assert next(row for row in rows_of if row.name == "memory, all").off is None


def test_what_comes_next(tmp_path):
    run = made_run(tmp_path / "run", end="running", logged=27, steps=50)
    board = board_of(run)
    found = [(each.what, each.in_steps) for each in upcoming(board)]
    assert found[:2] == [("log", 3), ("eval library, checkpoint", 13)]
    assert found[2][1] == 23 and found[2][0].startswith("the end: checkpoint, generate")
    assert when(upcoming(board)[1], 0.5) == "in 13 steps (6s)"
    run.log(28, 50)
    assert upcoming(board_of(run)) == []


def test_phases_stand_in_their_order_with_the_one_it_is_in(tmp_path):
    run = made_run(tmp_path / "run", "datasets", end="running", logged=70)
    found = stretches(board_of(run))
    assert [name for name, now in found if now] == ["drill"]
    assert [name for name, _ in found] == [phase.name for phase in board_of(run).planned.phases]


@pytest.mark.parametrize(
    ("end", "says"),
    [("done", ["DONE after 60 steps", "xtrain generate"]),
        ("stopped", ["STOPPED after 60 steps", "to resume from step 30"]),
        ("failed", ["FAILED after 60 steps", "rank 1: RuntimeError: boom", "logs: "])],
)  # fmt: skip
def test_an_ended_run_says_how_and_what_to_do(tmp_path, monkeypatch, end, says):
    monkeypatch.chdir(tmp_path)
    run = made_run(Path("run"), end=end, logged=60)

    async def play():
        async with opened(run.directory) as (app, _):
            text = shown(app)
            for words in says:
                assert words in text, text

    played(play())


def test_a_run_that_is_killed_shows_as_lost_within_five_seconds(tmp_path):
    run = made_run(tmp_path / "run", end="running", logged=60, steps=400)

    async def play():
        async with opened(run.directory) as (app, pilot):
            with run.alive():
                run.beat()
                await until(pilot, lambda: app.live.life.state == "training")
            run.beat(pid=2**22 + 1)  # of nobody
            await until(pilot, lambda: "LOST at step 60" in shown(app))
            assert "to resume from step 30" in shown(app)

    played(play())


def test_an_alert_is_a_note_once_and_stands_there_while_it_is_raised(tmp_path):
    run = made_run(tmp_path / "run", end="running", logged=60, steps=400)
    said = {"kind": "loss_spike", "message": "loss 9.1, 6.3 deviations above its mean", "value": 9.1, "limit": 6.0}

    async def play():
        async with opened(run.directory) as (app, pilot):
            run.event("alert", ranks=[], state="raised", **said)
            await until(pilot, lambda: "! loss spike: loss 9.1" in shown(app))
            assert "1 alert" in rows(app)[0] and "alerts" not in rows(app)[0]
            run.log(61, 62)
            await until(pilot, lambda: app.live.run.step == 62)
            assert [note.title for note in app._notifications].count("loss spike") == 1
            run.event("alert", ranks=[], state="cleared", **said)
            await until(pilot, lambda: "! loss spike" not in shown(app))

    with run.alive():
        played(play())


def test_a_screen_that_cannot_be_drawn_leaves_the_others(tmp_path, monkeypatch):
    from xtrain.tui.board.overview import OverviewPane

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = made_run(tmp_path / "run", logged=20)

    def show(self, board):
        raise KeyError("of all things")

    monkeypatch.setattr(OverviewPane, "show", show)

    async def play():
        async with opened(run.directory) as (app, pilot):
            log = tmp_path / "state" / "xtrain" / "dashboard.log"
            assert [note.message for note in app._notifications] == [f"Overview cannot be drawn; details are in {log}"]
            assert "KeyError: 'of all things'" in log.read_text()
            await pilot.press("2")
            await until(pilot, lambda: app.visited == "plan" and "setup" in shown(app))

    played(play())


def test_a_click_on_a_tab_leads_there(tmp_path):
    run = made_run(tmp_path / "run", logged=20)

    async def play():
        async with opened(run.directory) as (app, pilot):
            column = rows(app)[1].index("3 ") + 1
            await pilot.click(offset=(column, 1))
            await until(pilot, lambda: app.visited == "ranks")

    played(play())
