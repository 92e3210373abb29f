"""What is seen, compared with what was looked at and found right (`seen/*.txt`).

To accept what is seen now, delete the file and run the test twice.
"""

import json
import math
import re
from pathlib import Path

import pytest
from dashboards import opened, played, shown, until
from made_runs import START, made_run

from xtrain.tui.board.block import TextBlock

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
            text = "\n".join(block.text for block in app.screen.query(TextBlock) if block.display and block.text)
            compare(f"overview-{size[0]}x{size[1]}", text)

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


TRIALS, RUNGS = 10, (8, 24, 72)


def made_sweep(folder: Path) -> None:
    """Trials as `asha` leaves them: two in training, some stopped early; the loss follows from the rate."""
    lines: list[dict] = [{"event": "sweep_begin", "sweep_id": "s", "attempt": "a", "lag": 2}]
    lines[0]["objective"] = "eval/web/loss"
    for number in range(TRIALS):
        rate = 10 ** (-4 + 3 * (number * 3 % TRIALS) / TRIALS)
        away = abs(math.log10(rate) + 2)
        rungs = 3 if away < 0.5 else 2 if away < 1 else 1
        name, loss = f"{number:03d}-x", lambda step, away=away: 2 + away + 6 / (step + 2)
        point = {"optimizer.lr": f"{rate:.4g}", "model.ffn": ("64", "128")[number % 2]}
        asked = {"event": "trial_asked", "trial": number, "name": name, "point": point, "sameness": name}
        lines.append({**asked, "config_id": "c", "same_as": None})
        trained = RUNGS[rungs - 1] if number < TRIALS - 2 else 16
        with made_run(folder / name, logged=1).directory.joinpath("metrics.jsonl").open("w") as file:
            for step in range(2, trained + 1, 2):
                row = {"step": step, "time": START + step, "tokens": 512 * step, "loss": loss(step) - 0.1}
                file.write(json.dumps(row | ({"eval/web/loss": loss(step)} if step % 4 == 0 else {})) + "\n")
        for rung in range(rungs if number < TRIALS - 2 else 1):
            step, last = RUNGS[rung], rung == 2
            measured = {"event": "trial_measured", "trial": number, "rung": None if last else rung, "trained": step}
            lines.append({**measured, "tokens": 512 * step, "value": loss(step)})
            goes_on = number >= TRIALS - 2 or rung < rungs - 1
            if not last:
                decided = {"event": "trial_decided", "trial": number, "rung": rung, "goes_on": goes_on}
                lines.append({**decided, "place": 1, "of": number + 1})
        if number >= TRIALS - 2:
            lines.append({"event": "trial_started", "trial": number, "rung": 1})
    text = "".join(json.dumps({"step": 0, "time": START, **each}) + "\n" for each in lines)
    (folder / "sweep.jsonl").write_text(text)


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
                await pilot.press("p")
                await until(pilot, lambda: "eval/web/loss" in shown(app) and "Trials" not in shown(app))
                await pilot.press("o")
                await until(pilot, lambda: shown(app).count("loss") and "eval/web/loss" not in shown(app))
                await pilot.press("p")
                await until(pilot, lambda: "Trials" in shown(app))

    played(play())
