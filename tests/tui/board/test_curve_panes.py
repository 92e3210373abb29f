"""Every key of the screens Experts, Datasets, Events and Compare."""

from pathlib import Path

import pytest
from dashboards import faults, opened, played, rows, shown, until
from made_runs import made_run
from textual.widgets import Input, OptionList

from xtrain.tui.board.compare import ComparePane
from xtrain.tui.board.lists import DatasetsPane, EventsPane, ExpertsPane
from xtrain.tui.board.pane import Sheet
from xtrain.tui.board.plot import Plot


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    made_run(root / "one" / "aaaa", "datasets", logged=60)
    made_run(root / "one" / "bbbb", "datasets", logged=40, steps=400)
    made_run(root / "two" / "cccc", "experts", logged=30)
    return root


def cursor(sheet: Sheet) -> str:
    """The row under the cursor."""
    marked = [row for row in sheet._rows if row and "cursor" in row[0][1]]
    return "".join(text for text, _ in marked[0]).strip() if marked else ""


def test_events(root):
    async def play():
        async with opened(root / "one" / "aaaa", (80, 24), first="events") as (app, pilot):
            pane = app.query_one(EventsPane)
            sheet = pane.query_one(Sheet)
            await until(pilot, lambda: "run_end" in cursor(sheet))
            for key, expected in {
                "up": "noise", "down": "run_end", "k": "noise", "j": "run_end", "home": "run_start", "end": "run_end",
                "pageup": "setup", "pagedown": "run_end", "up f": "run_end",
            }.items():  # fmt: skip
                await pilot.press(*key.split())
                assert expected in cursor(sheet), key
            await pilot.press("home", "enter")
            assert "run_start · step 0" in shown(app) and "world_size" in shown(app)
            await pilot.press("enter", "home", "enter", "escape")
            assert "Events ──" in shown(app)
            await pilot.press("right_square_bracket")
            assert pane._view.kinds == "run_start"
            await pilot.press("right", "left", "left_square_bracket")
            assert pane._view.kinds == "all"
            await pilot.press("l")
            assert "rank 0 stdout ──" in shown(app) and "a line of a library" in shown(app)
            await pilot.press("up", "pageup")
            assert "not following" in shown(app)
            await pilot.press("escape", "slash", *"drills")
            assert isinstance(app.focused, Input) and "“drills”" in shown(app)
            await pilot.press("enter")
            assert app.focused is sheet and all("drills" in row for row in rows(app)[4:6])
            await pilot.press("slash", "escape")
            await pilot.pause()
            assert "“drills”" not in shown(app) and app.focused is sheet
            assert faults(app) == []

    played(play())


def test_experts(root):
    async def play():
        async with opened(root / "two" / "cccc", (80, 24), first="experts") as (app, pilot):
            pane = app.query_one(ExpertsPane)
            sheet = pane.query_one(Sheet)
            await until(pilot, lambda: "layer 0, experts by load" in shown(app))
            last = pane._loads[0].times
            assert all(f"{value:.2f}" in shown(app) for value in last)
            for key, layer in {
                "down": 1,
                "j": 2,
                "up": 1,
                "k": 0,
                "end": 3,
                "home": 0,
                "pagedown": 3,
                "pageup": 0,
            }.items():
                await pilot.press(key)
                assert cursor(sheet).startswith(str(layer)), key
            await pilot.press("o")
            assert pane._view.worst_first
            await pilot.press("a")
            assert app.focused is pane.query_one(Plot) and not sheet.display
            assert pane.query_one(Plot).text.startswith("aux loss (1: balanced)  1.020")
            await pilot.press("a")
            assert app.focused is sheet and sheet.display
            assert faults(app) == []
            # A skipped step has no loads: those of the step before stay.
            with (root / "two" / "cccc" / "metrics.jsonl").open("a") as file:
                file.write('{"step":31,"time":1795000031.0,"phase":"train","tokens":1}\n')
            await until(pilot, lambda: "step 31" in rows(app)[2])
            assert "layer 0, experts by load" in shown(app)

    played(play())


def test_datasets(root):
    async def play():
        async with opened(root / "one" / "aaaa", (80, 24), first="datasets") as (app, pilot):
            pane = app.query_one(DatasetsPane)
            plot = pane.query_one(Plot)
            await until(pilot, lambda: "loss by dataset" in shown(app))
            assert "code" in shown(app) and "● code" in plot.text
            await pilot.press("v")
            assert plot.text.startswith("held-out loss  ● code 4.")
            await pilot.press("v")
            assert plot.text.startswith("data wait")
            await pilot.press("v", "down", "j", "up", "k", "pagedown", "pageup")
            assert pane._view.place == 0
            await pilot.press("n", "s")
            assert app.focused is plot and "smoothed 0.9" in plot.text
            assert faults(app) == []

    played(play())


def test_compare(root):
    async def play():
        other = root / "one" / "bbbb"
        async with opened(root / "one" / "aaaa", (80, 24), first="compare", compared=[other]) as (app, pilot):
            pane = app.query_one(ComparePane)
            plot = pane.query_one(Plot)
            await until(pilot, lambda: "at 40" in shown(app))
            assert "2 runs" in rows(app)[2] and "○ curricul…·bbbb" in shown(app) and "+0.0000" not in shown(app)
            await pilot.press("l", "c")
            assert plot.view.log and plot.view.cursor == 60  # the curves have the keys first
            await pilot.press("x")
            assert "by tokens" in rows(app)[2]
            await pilot.press("x")
            assert "by time" in rows(app)[2]
            await pilot.press("x", "d")
            assert "Settings that differ" in shown(app) and "●  200" not in shown(app)
            assert "steps" in shown(app) and "○ 400" in shown(app)
            await pilot.press("d", "m", "down", "j", "up", "enter")
            assert pane._key == "grad_norm" and "grad_norm · by step" in rows(app)[2]
            await pilot.press("m", "pagedown", "pageup", "m")
            assert pane._choosing == ""
            await pilot.press("r")
            await until(pilot, lambda: "[x] one/bbbb" in shown(app) and "[ ] two/cccc" in shown(app))
            assert rows(app)[2].startswith("Runs to compare with ──")
            assert rows(app)[2].endswith("─ 2 · enter: add or remove · esc: back")
            await pilot.press("slash", *"CCz")
            assert "“CCz” · 0" in rows(app)[2] and "none with this text" in shown(app)
            await pilot.press("backspace", *"cc", "enter")
            assert isinstance(app.focused, OptionList) and "“CCcc” · 1" in rows(app)[2]
            await pilot.press("enter", "escape")
            await until(pilot, lambda: "3 runs" in rows(app)[2] and "·cccc" in shown(app) and "at 30" in shown(app))
            await pilot.press("r")
            await until(pilot, lambda: "[x] two/cccc" in shown(app))
            await pilot.press("k", "enter", "escape")
            await until(pilot, lambda: "2 runs" in rows(app)[2])
            assert faults(app) == []

    played(play())


def test_a_compared_run_that_goes_away_or_never_was(tmp_path):
    run = made_run(tmp_path / "a", "dense", logged=20).directory

    async def play():
        async with opened(run, (80, 24), first="compare", compared=[run, tmp_path / "nowhere"]) as (app, pilot):
            await until(pilot, lambda: "2 runs" in shown(app) and "waiting" in shown(app))
            assert "·nowh" in shown(app) and "no values" not in app.query_one(Plot).text
            await pilot.press("d")
            assert "not all plans can be read yet" in shown(app)
            await pilot.press("escape")
            assert "Settings" not in shown(app)

    played(play())
