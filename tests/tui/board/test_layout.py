"""Every screen at every size: nothing longer than the terminal, cut in half, or over something else."""

from pathlib import Path

import pytest
from dashboards import SIZES, faults, opened, played, rows, shown, until
from made_runs import made_run

SMALLEST = (40, 12)


async def look_over(run: Path, others: list[Path], sizes) -> list[str]:
    found: list[str] = []
    async with opened(run, sizes[0], compared=others) as (app, pilot):
        names = [name for _, name, _ in app._screens()]
        for size in sizes:
            await pilot.resize_terminal(*size)
            await pilot.pause(0.1)
            for name in names:
                await app.action_visit(name)
                await until(pilot, lambda name=name: app.visited == name)
                await pilot.pause(0.1)
                found += [f"{name} at {size}: {fault}" for fault in faults(app)]
                assert len(rows(app)) == size[1]
                assert rows(app)[-1].startswith(" ? help"), f"{name} at {size}"
    return found


def test_every_screen_is_whole_at_every_size(tmp_path):
    run = made_run(tmp_path / "a", "datasets", logged=60).directory
    other = made_run(tmp_path / "b", "datasets", logged=40).directory
    found: list[str] = []

    async def play():
        found.extend(await look_over(run, [other], (*SIZES, SMALLEST)))

    played(play())
    assert found == []


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["dense", "experts", "pipeline", "large"])
@pytest.mark.parametrize("end", ["starting", "running", "failed", "killed"])
def test_every_screen_of_every_run_is_whole(tmp_path, shape, end):
    run = made_run(tmp_path / "a", shape, end=end, logged=60).directory
    found: list[str] = []

    async def play():
        found.extend(await look_over(run, [], (*SIZES, SMALLEST)))

    played(play())
    assert found == []


def test_questions_and_help_fit_the_smallest_terminal(tmp_path):
    run = made_run(tmp_path / "a", "datasets", end="running", logged=40, steps=400)

    async def play():
        async with opened(run.directory, SMALLEST, launcher=1) as (app, pilot):
            for key in ("X", "E", "P", "q", "question_mark"):
                await pilot.press(key)
                await until(pilot, lambda: len(app.screen_stack) == 2)
                await pilot.pause(0.1)
                assert faults(app) == []
                if key != "question_mark":
                    assert "(n)" in shown(app), key
                await pilot.press("escape")
                await until(pilot, lambda: len(app.screen_stack) == 1)

    with run.alive():
        played(play())


def test_a_terminal_without_utf_8_gets_nothing_but_ascii(tmp_path, monkeypatch):
    monkeypatch.setenv("LC_ALL", "de_DE.ISO-8859-1")
    run = made_run(tmp_path / "é", "datasets", end="running", logged=40, steps=400)
    other = made_run(tmp_path / "b", "datasets", logged=40).directory
    run.event("alert", kind="slow", message="½ as fast", value=1, limit=2, ranks=[], state="raised")

    async def play():
        async with opened(run.directory, (120, 40), compared=[other]) as (app, pilot):
            for name in [name for _, name, _ in app._screens()]:
                await app.action_visit(name)
                await until(pilot, lambda name=name: app.visited == name)
                await pilot.pause(0.1)
                assert shown(app).isascii() and faults(app) == [], name
            await pilot.press("1")
            await until(pilot, lambda: "? as fast" in shown(app))
            for key in ("X", "question_mark"):
                await pilot.press(key)
                await until(pilot, lambda: len(app.screen_stack) == 2)
                await pilot.pause(0.1)
                assert shown(app).isascii(), key
                await pilot.press("escape")
                await until(pilot, lambda: len(app.screen_stack) == 1)

    with run.alive():
        played(play())


def test_a_terminal_that_is_too_small_is_reported_and_grows_again(tmp_path):
    run = made_run(tmp_path / "a", logged=20).directory

    async def play():
        async with opened(run, (39, 24)) as (app, pilot):
            assert shown(app).strip() == "39×24: needs 40×12"
            await pilot.resize_terminal(80, 11)
            await pilot.pause(0.1)
            assert shown(app).strip() == "80×11: needs 40×12"
            await pilot.resize_terminal(80, 24)
            await pilot.pause(0.1)
            assert "[1 Overview]" in rows(app)[1]

    played(play())
