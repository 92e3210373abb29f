"""Captures of every screen of the dashboard, as text at each size and as SVG at one.

    python tests/support/capture_dashboard.py RUN docs/screens [--compare OTHER …]

Every capture is looked over: what is cut, or lies over something else, is printed, and the exit code is 1.
"""

import argparse
import asyncio
import sys
from pathlib import Path

from dashboards import SIZES, faults, opened, rows, until

from xtrain.tui.board.screens import SCREENS

PICTURED = (120, 40)


async def capture(run: Path, folder: Path, others: list[Path], name: str, size: tuple[int, int]) -> list[str]:
    """Write one screen at one size; what is wrong with it. A screen that the run does not have is left out."""
    async with opened(run, size, first=name, compared=others) as (app, pilot):
        if app.visited != name:
            await pilot.pause(0.5)
        if app.visited != name:
            return []
        await until(pilot, lambda: not app._notifications)  # a toast lies over what is captured
        await pilot.pause(0.3)
        stem = f"dashboard-{name}-{size[0]}x{size[1]}"
        (folder / f"{stem}.txt").write_text("\n".join(rows(app)) + "\n")
        if size == PICTURED:
            picture = app.export_screenshot(title=f"xtrain watch runs/{run.absolute().parent.name}", simplify=True)
            (folder / f"{stem}.svg").write_text(picture)
        return [f"{stem}: {fault}" for fault in faults(app)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--compare", type=Path, nargs="+", default=[])
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    found: list[str] = []
    for name in SCREENS:
        for size in SIZES:
            found += asyncio.run(capture(arguments.run, arguments.folder, arguments.compare, name, size))
    print("\n".join(found) or "every screen is whole at every size")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
