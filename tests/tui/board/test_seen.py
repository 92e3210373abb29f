"""What is seen, compared with what was looked at and found right (`seen/*.txt`).

To accept what is seen now, delete the file and run the test twice.
"""

import re
from pathlib import Path

import pytest
from dashboards import opened, played, shown, until
from made_runs import TRIALS, made_run, made_sweep

from xtrain.tui.board.pane import TextBlock

SEEN = Path(__file__).parent / "seen"
AGES = re.compile(r"\b[\dwdhms]+ ago")


def compare(name: str, text: str) -> None:
    text = AGES.sub("… ago", "\n".join(line.rstrip() for line in text.splitlines())) + "\n"
    path = SEEN / f"{name}.txt"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        pytest.fail(f"{path} was not there and has been written: look at it")
    assert text == path.read_text()


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """A run with phases that failed on its way, at a path that is the same everywhere."""
    monkeypatch.chdir(tmp_path)
    return made_run(Path("runs/curriculum/a1"), "datasets", end="failed", logged=130).directory


@pytest.mark.parametrize("size", [(120, 40), (60, 20)])
def test_overview(run, size):
    async def play():
        async with opened(run, size) as (app, pilot):
            await pilot.pause()
            # Curves have tests of their own.
            shown = (str(block.visual) for block in app.screen.query(TextBlock) if block.display)
            compare(f"overview-{size[0]}x{size[1]}", "\n".join(filter(None, shown)))

    played(play())


def test_a_question(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = made_run(Path("runs/curriculum/a1"), "datasets", end="running", logged=130)

    async def play():
        async with opened(run.directory) as (app, pilot):
            await until(pilot, lambda: app.live.life.state == "training")
            await pilot.press("X")
            await until(pilot, lambda: len(app.screen_stack) == 2)
            await pilot.pause()
            text = shown(app).splitlines()
            first = next(row for row, line in enumerate(text) if "╭" in line)
            last = next(row for row, line in enumerate(text) if "╰" in line)
            left, right = text[first].index("╭"), text[first].index("╮")
            compare("question-stop", "\n".join(line[left : right + 1] for line in text[first : last + 1]))

    with run.alive():
        played(play())


@pytest.mark.parametrize("size", [(120, 40), (60, 20)])
def test_sweep(tmp_path, monkeypatch, size):
    monkeypatch.chdir(tmp_path)
    made_sweep(Path("runs/sizes-sweep-1a2b3c4d"))

    async def play():
        run = Path("runs/sizes-sweep-1a2b3c4d/009-x")
        async with opened(run, size, first="sweep") as (app, pilot):
            await until(pilot, lambda: len(app.board.trials) == TRIALS)
            await pilot.pause()
            compare(f"sweep-{size[0]}x{size[1]}", shown(app))
            if size == (60, 20):
                assert "eval/web/loss" not in shown(app)
                await pilot.press("v")
                await until(pilot, lambda: "eval/web/loss" in shown(app) and "Trials" not in shown(app))
                await pilot.press("o")
                await until(pilot, lambda: shown(app).count("loss") and "eval/web/loss" not in shown(app))
                await pilot.press("v")
                await until(pilot, lambda: "Trials" in shown(app))

    played(play())
