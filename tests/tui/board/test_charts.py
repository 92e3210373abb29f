"""The Charts screen: all metrics in a grid, one cursor, filter and axis, one plot alone, and saved plots."""

import json
import re
import xml.dom.minidom
from pathlib import Path

import pytest
from dashboards import faults, opened, played, rows, shown, until
from made_runs import MadeRun, made_run, made_sweep
from textual.widgets import Input

from xtrain.tui.board.app import BoardApp
from xtrain.tui.board.charts import MOST_PLOTS, ChartsPane
from xtrain.tui.board.compare import ComparePane, SweepPane
from xtrain.tui.board.plot import Plot


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MadeRun:
    monkeypatch.chdir(tmp_path)
    return made_run(Path("runs/curriculum/aaaa"), "datasets", logged=150)


def plots(app: BoardApp) -> dict[str, Plot]:
    """The plots that are shown, by metric, in their order."""
    pane = app.query_one(ChartsPane)
    by_plot = {plot: key for key, plot in pane._plots.items()}
    return {by_plot[plot]: plot for plot in pane.query(Plot) if plot.display}


def said(app: BoardApp) -> str:
    """What was notified last."""
    return next((note.message for note in reversed(list(app._notifications))), "")


@pytest.mark.parametrize("size", [(200, 50), (120, 40), (80, 24), (60, 20), (40, 12)])
def test_the_most_important_metrics_come_first(run: MadeRun, size: tuple[int, int]) -> None:
    async def play() -> None:
        async with opened(run.directory, size, first="charts") as (app, pilot):
            await until(pilot, lambda: "loss  3.2546" in shown(app) and "│" in shown(app))
            assert list(plots(app))[:6] == [
                "loss",
                "grad_norm",
                "lr",
                "tokens_per_second",
                "memory_bytes",
                "step_seconds",
            ]
            assert list(plots(app))[6].startswith("eval/") and app.focused is plots(app)["loss"]
            assert faults(app) == []

    played(play())


def test_cursor_and_range_are_shared_and_the_scale_is_not(run: MadeRun) -> None:
    async def play() -> None:
        async with opened(run.directory, (120, 40), first="charts") as (app, pilot):
            await until(pilot, lambda: "loss  3.2546" in shown(app))
            await pilot.press("plus", "c", "left", "y", "l")
            await until(pilot, lambda: plots(app)["loss"].view.log)
            views = {key: plot.view for key, plot in plots(app).items()}
            assert len({(view.cursor, view.span, view.right) for view in views.values()}) == 1
            assert views["lr"].cursor == 149 and views["loss"].fit == "percentile" and views["loss"].log
            assert views["lr"].fit == "auto" and not views["lr"].log
            await pilot.pause()
            record = json.loads((run.directory / "metrics.jsonl").read_text().splitlines()[148])
            assert f"step 149  {record['lr']!r}" in shown(app)

    played(play())


def test_the_filter_the_axis_and_one_plot_alone(run: MadeRun) -> None:
    async def play() -> None:
        async with opened(run.directory, (120, 40), first="charts") as (app, pilot):
            await until(pilot, lambda: "loss  3.2546" in shown(app))
            await pilot.press("x")
            assert "by tokens" in rows(app)[2]
            await pilot.press("x")
            await pilot.pause()
            assert "by time" in rows(app)[2] and re.search(r"\b0 +50 s", shown(app))
            await pilot.press("slash", *"EVAL/* rows/code")
            await until(pilot, lambda: "4 metrics" in rows(app)[2])
            assert set(plots(app)) == {"eval/code/loss", "eval/drills/loss", "eval/noise/loss", "rows/code"}
            await pilot.press("enter", "n", "enter")
            await until(pilot, lambda: rows(app)[0].startswith("eval/drills/loss"))
            assert faults(app) == []
            await pilot.press("escape")
            await until(pilot, lambda: "4 metrics" in rows(app)[2])
            await pilot.press("escape")
            await until(pilot, lambda: "20 metrics" in rows(app)[2])
            await pilot.press("slash", *"nothing")
            await until(pilot, lambda: "0 metrics" in rows(app)[2])
            await pilot.press("enter")
            assert not isinstance(app.focused, Input)

    played(play())


def test_plots_below_are_drawn_once_they_are_seen(run: MadeRun) -> None:
    async def play() -> None:
        async with opened(run.directory, (120, 40), first="charts") as (app, pilot):
            await until(pilot, lambda: "loss  3.2546" in shown(app))
            last = list(plots(app).values())[-1]
            assert "rows/noise" not in shown(app) and last._curves == ()
            last.focus()
            await until(pilot, lambda: "rows/noise  450" in shown(app))

    played(play())


def test_new_metrics_of_a_run_take_their_place(run: MadeRun) -> None:
    async def play() -> None:
        async with opened(run.directory, (120, 40), first="charts") as (app, pilot):
            await until(pilot, lambda: "loss  3.2546" in shown(app))
            run.append("metrics.jsonl", {"step": 151, "time": run.now(151), "loss": 9.0, "reward": 0.5, "hook/a": 1.0})
            await until(pilot, lambda: "reward  0.50000" in shown(app) and "loss  9" in shown(app))
            assert list(plots(app))[:2] == ["loss", "reward"] and list(plots(app))[-1] == "hook/a"

    played(play())


def test_a_run_with_many_metrics(run: MadeRun) -> None:
    run.append(
        "metrics.jsonl", {"step": 151, "time": run.now(151), **{f"hook/{number}": 1.0 for number in range(1500)}}
    )

    async def play() -> None:
        async with opened(run.directory, (120, 40), first="charts") as (app, pilot):
            await until(pilot, lambda: "1,520 metrics" in rows(app)[2] and len(plots(app)) == MOST_PLOTS)
            await pilot.press("slash", *"hook/1499")
            await until(pilot, lambda: list(plots(app)) == ["hook/1499"])

    played(play())


def test_a_plot_is_saved_as_it_is_seen(run: MadeRun) -> None:
    async def play() -> None:
        async with opened(run.directory, (120, 40), first="charts") as (app, pilot):
            await until(pilot, lambda: "loss  3.2546" in shown(app))
            await pilot.press("l", "plus", "p")
            await until(pilot, lambda: said(app).startswith("saved"))
            await pilot.press("p")
            await until(pilot, lambda: Path("aaaa-loss-2.svg").exists())

    played(play())
    found = Path("aaaa-loss.svg").read_text()
    xml.dom.minidom.parseString(found)
    assert (
        "curriculum·aaaa 3.2546" in found and ">loss<" in found and "by step" in found and 'class="curve c0"' in found
    )


def test_where_a_plot_cannot_be_saved(run: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "cwd", classmethod(lambda cls: tmp_path / "nowhere"))

    async def play() -> None:
        async with opened(tmp_path / "runs/curriculum/aaaa", (120, 40), first="charts") as (app, pilot):
            await until(pilot, lambda: "loss  3.2546" in shown(app))
            await pilot.press("p")
            await until(pilot, lambda: "the plot cannot be saved" in said(app))

    played(play())


def test_a_run_has_one_color_on_all_screens(tmp_path: Path) -> None:
    made_sweep(tmp_path / "sizes-sweep-1a2b3c4d")
    mine, other = (tmp_path / "sizes-sweep-1a2b3c4d" / name for name in ("009-x", "008-x"))

    async def play() -> None:
        async with opened(mine, (120, 40), first="sweep", compared=[other]) as (app, pilot):
            plot = app.query_one(SweepPane).query_one(Plot)
            await until(pilot, lambda: "009" in plot.text and "008" in plot.text)
            colors = {curve.line.name.split()[0]: curve.line.color for curve in plot._curves}
            await app.action_visit("compare")
            compare = app.query_one(ComparePane).query_one(Plot)
            await until(pilot, lambda: len(compare._curves) == 2 and "·008" in compare.text)
            assert [curve.line.color for curve in compare._curves] == [colors["009"], colors["008"]] != [0, 1]

    played(play())
