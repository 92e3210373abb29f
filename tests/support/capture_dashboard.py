"""Captures of every screen of the dashboard (docs/screens): text at each size, and SVG at one.

    python tests/support/capture_dashboard.py            # which differ
    python tests/support/capture_dashboard.py --write    # take what is shown now

They are the same on any machine: runs are made (`made_runs`), clocks stand still, and hosts and processes have fixed
names.
"""

import argparse
import asyncio
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, chdir, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from dashboards import PATIENCE_SECONDS, SIZES, faults, opened, rows
from made_runs import START, MadeRun, made_run, made_sweep

from xtrain.tui.board.app import BoardApp
from xtrain.tui.board.terminal import pane_classes
from xtrain.tui.model import rank_reader

SCREENS = Path(__file__).parents[2] / "docs/screens"
PICTURED = (120, 40)
RUN, OTHER = Path("runs/moe_cpu/2339a39-41828748"), Path("runs/moe_cpu/2339a39-9c02b1de")
# Run → the screens that are captured of it.
CAPTURED = {
    RUN: ("overview", "plan", "ranks", "experts", "events", "compare", "charts"),
    Path("runs/curriculum/7d40116-5f1c83e0"): ("datasets",),
    Path("runs/sizes-sweep-1a2b3c4d/009-x"): ("sweep",),
}
NOW = START + 31.0
SETTLED_SECONDS = 1.0
TERMINAL = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "LC_ALL": "C.UTF-8"}


@contextmanager
def standing_still() -> Iterator[None]:
    """Give every clock that is shown one time, and the machine one name."""
    # Ranks beat once: they must not fall silent while a slow machine draws.
    clocks = SimpleNamespace(time=lambda: NOW, monotonic=lambda: 0.0)
    with (
        patch.object(time, "time", clocks.time),
        patch.object(rank_reader, "time", clocks),
        patch.object(socket, "gethostname", lambda: "node0"),
        patch.dict(os.environ, {"TZ": "UTC", **TERMINAL}),
    ):
        os.environ.pop("NO_COLOR", None)
        time.tzset()
        yield
    time.tzset()


def running(run: MadeRun) -> MadeRun:
    run.beat(pid=4711)
    return run


def rewrite(run: MadeRun, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Replace fields in the record of every step."""
    path = run.directory / "metrics.jsonl"
    records = map(json.loads, path.read_text().splitlines())
    path.write_text("".join(json.dumps(record | change(record)) + "\n" for record in records))


@contextmanager
def runs(folder: Path) -> Iterator[None]:
    """Make the captured runs in `folder`, and stay there: paths of runs are shown."""
    with chdir(folder), standing_still(), ExitStack() as stack:
        experts, datasets, sweep = CAPTURED
        for path, shape in ((experts, "experts"), (datasets, "datasets")):
            run = running(made_run(path, shape, end="killed", logged=40, slow={2: 1.2}))
            stack.enter_context(run.alive())
        shares = run.plan["timeline"]["phases"][0]["shares"]
        rewrite(run, lambda record: {f"rows/{name}": 16 * share * record["step"] for name, share in shares.items()})
        other = made_run(OTHER, "experts", end="stopped", logged=24, steps=40)
        rewrite(other, lambda record: {"loss": 1.08 * record["loss"]} if "loss" in record else {})
        made_sweep(sweep.parent)
        yield


def shows(app: BoardApp, name: str) -> bool:
    """Return True once the tab line says that this is the screen."""
    kind = pane_classes()[name]
    return app.visited == name and any(f"{title}]" in rows(app)[1] for title in (kind.title, kind.short))


async def captures_of(run: Path, size: tuple[int, int], kept: Path) -> dict[str, str]:
    """Return file name → text of a run's captures at one size. kept: the folder of the captures that there are.

    Raises AssertionError if something is cut on a screen, or lies over something else.
    """
    found: dict[str, str] = {}
    async with opened(run, size, first=CAPTURED[run][0], compared=[OTHER]) as (app, pilot):
        for name in CAPTURED[run]:
            await app.action_visit(name)
            stem = f"dashboard-{name}-{size[0]}x{size[1]}"
            text = kept / f"{stem}.txt"
            expected = text.read_text().splitlines() if text.exists() else []
            began = since = time.monotonic()
            seen = rows(app)
            # Curves and other runs are read in the background.
            while not shows(app, name) or app._notifications or time.monotonic() - since < SETTLED_SECONDS:
                await pilot.pause(0.02)
                assert time.monotonic() - began < PATIENCE_SECONDS, f"{stem} is not shown, or does not settle"
                if shows(app, name) and rows(app) == expected:
                    break
                if rows(app) != seen:
                    seen, since = rows(app), time.monotonic()
            wrong = faults(app)
            assert not wrong, f"{stem}: {wrong}"
            found[text.name] = "\n".join(rows(app)) + "\n"
            if size == PICTURED:
                found[f"{stem}.svg"] = app.export_screenshot(title=f"xtrain watch {run.parent}", simplify=True)
    return found


def captures(folder: Path, kept: Path = SCREENS) -> dict[str, str]:
    """Return file name → text of all captures; `folder` takes the runs."""
    found: dict[str, str] = {}
    with runs(folder):
        for run in CAPTURED:
            for size in SIZES:
                found |= asyncio.run(captures_of(run, size, kept))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="take what is shown now")
    write = parser.parse_args().write
    with tempfile.TemporaryDirectory() as folder:
        now = captures(Path(folder))
    old = {path.name: path.read_text() for path in SCREENS.glob("dashboard-*")}
    differ = sorted(name for name in now | old if now.get(name) != old.get(name))
    print("\n".join(differ) or "every capture is what is shown now")
    for name in differ if write else ():
        if name in now:
            (SCREENS / name).write_text(now[name])
        else:
            (SCREENS / name).unlink()
    return bool(differ) and not write


if __name__ == "__main__":
    sys.exit(main())
