"""One screen of the dashboard by itself, for tests of its keys."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any, TypeVar

from textual.app import App
from textual.pilot import Pilot

from xtrain.tui.board.pane import Pane, Sheet
from xtrain.tui.model.board import Board

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
