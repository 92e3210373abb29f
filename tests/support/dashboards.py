"""The dashboard without a terminal: opened on a run's directory, read as text, and looked over for what is cut."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

from rich.cells import cell_len
from textual.app import App
from textual.pilot import Pilot
from textual.widget import Widget

from xtrain.tui.board.app import BoardApp
from xtrain.tui.board.pane import Pane, Sheet
from xtrain.tui.model.board import Board

# The dashboard without a terminal -------------------------------------------------------------------------------------


SIZES = ((200, 50), (120, 40), (80, 24), (60, 20))
# A slow machine under load: what is waited for takes a tenth of a second on a quiet one.
PATIENCE_SECONDS = 20.0
LOOK_SECONDS = 0.02


@asynccontextmanager
async def opened(
    directory: Path, size: tuple[int, int] = (80, 24), **options: Any
) -> AsyncIterator[tuple[BoardApp, Pilot]]:
    """The dashboard once it has read what there is and drawn it."""
    app = BoardApp(directory, **options)
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: app.board is not None and app.board.loading is None and bool(app.visited))
        await pilot.pause()
        yield app, pilot


async def until(pilot: Pilot, holds: Any) -> None:
    """Wait until `holds()`; an assertion fails where it never does."""
    for _ in range(int(PATIENCE_SECONDS / LOOK_SECONDS)):
        if holds():
            return
        await pilot.pause(LOOK_SECONDS)
    raise AssertionError("what was waited for has not come")


def played(play: Coroutine[Any, Any, None]) -> None:
    """Run what a test does with the dashboard."""
    asyncio.run(play)


def rows(app: BoardApp) -> list[str]:
    """What is on the screen, row by row, without what the styles say."""
    strips = app.screen._compositor.render_strips()
    return ["".join(segment.text for segment in strip).rstrip() for strip in strips]


def shown(app: BoardApp) -> str:
    """The same as one text."""
    return "\n".join(rows(app))


def faults(app: BoardApp) -> list[str]:
    """What is not whole on the screen: rows longer than it, widgets that are cut or lie over one another."""
    width, height = app.size
    found = [f"row {row} has {cell_len(text)} of {width} columns" for row, text in enumerate(rows(app))
             if cell_len(text) > width]  # fmt: skip
    if len(rows(app)) > height:
        found.append(f"{len(rows(app))} of {height} rows")
    leaves = _leaves(app)
    for widget, region, clip in leaves:
        scrolls = any(parent.is_scrollable and parent is not app.screen for parent in _parents(widget))
        if region.intersection(clip) != region and not scrolls:
            found.append(f"{_name(widget)} at {region} is cut by {clip}")
    seen = [(widget, region.intersection(clip)) for widget, region, clip in leaves]
    for place, (one, at) in enumerate(seen):
        for other, there in seen[place + 1 :]:
            if at.overlaps(there) and not {one, other} & {*_parents(one), *_parents(other)}:
                found.append(f"{_name(one)} at {at} lies over {_name(other)} at {there}")
    return found


def _leaves(app: BoardApp) -> list[tuple[Widget, Any, Any]]:
    """Widgets without others in them that can be seen, where they are, and what they are seen through."""
    found = []
    for widget, geometry in app.screen._compositor.full_map.items():
        leaf = not any(child.display for child in widget.children) and not widget.has_class("-textual-system")
        seen = geometry.region.intersection(geometry.clip).area
        if leaf and widget.visible and seen and widget is not app.screen:
            found.append((widget, geometry.region, geometry.clip))
    return found


def _parents(widget: Widget) -> list[Widget]:
    return [node for node in widget.ancestors if isinstance(node, Widget)]


def _name(widget: Widget) -> str:
    return f"{type(widget).__name__}#{widget.id}" if widget.id else type(widget).__name__


# One screen of the dashboard by itself, for tests of its keys ---------------------------------------------------------


PaneT = TypeVar("PaneT", bound=Pane)


def piloted(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """A test that presses keys, run to its end."""

    @wraps(test)
    def run() -> None:
        asyncio.run(test())  # type: ignore[arg-type]

    return run


@asynccontextmanager
async def alone(kind: type[PaneT], board: Board, size: tuple[int, int]) -> AsyncIterator[tuple[Pilot[Any], PaneT]]:
    """A pane that shows `board`, and nothing else on the screen; its sheet has the focus."""
    pane = kind(id="pane")
    app: App[None] = App()
    async with app.run_test(size=size) as pilot:
        await app.mount(pane)
        pane.query_one(Sheet).focus()
        await pilot.pause()
        pane.show(board)
        await pilot.pause()
        yield pilot, pane


def text(pane: Pane) -> str:
    """What is on the screen, through the widget that draws it."""
    sheet = pane.query_one(Sheet)
    return "\n".join(sheet.render_line(y).text for y in range(sheet.size.height))
