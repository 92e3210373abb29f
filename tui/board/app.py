"""The application: one run, seven screens, and the keys that lead there."""

from collections.abc import Sequence
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING

from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.message import Message
from textual.widgets import ContentSwitcher, Static

from .pane import Pane
from .screens import SCREENS, pane_classes

if TYPE_CHECKING:
    from ..model.board import Board

POLL_SECONDS = 0.25


class Polled(Message):
    """The reading thread has a newer board."""


class BoardApp(App[int]):
    """Shows the run in `directory`; `compared` are further runs for the Compare screen, `screen` the first one shown.

    `board` is what was last read; panes are given it with `show`.
    """

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #tabs, #head, #keys { height: 1; }
    """
    BINDINGS = [  # noqa: RUF012
        *(Binding(str(place + 1), f"visit('{name}')", name) for place, name in enumerate(SCREENS)),
        Binding("tab", "next(1)", "next screen", priority=True),
        Binding("shift+tab", "next(-1)", "screen before", priority=True),
        Binding("q", "quit", "quit"),
    ]

    def __init__(self, directory: Path, *, compared: Sequence[Path] = (), first: str = "overview") -> None:
        super().__init__()
        self.directory = directory
        self.compared = tuple(compared)
        self.board: Board | None = None
        self.visited = first
        self._classes = pane_classes()
        self._panes: dict[str, Pane] = {}
        self._newest: Board | None = None
        self._leaving = Event()

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield Static(id="tabs")
        yield ContentSwitcher(id="screens")
        yield Static(id="keys")

    def on_mount(self) -> None:
        Thread(target=self._read, name="reader", daemon=True).start()

    def on_unmount(self) -> None:
        self._leaving.set()

    def _read(self) -> None:
        from ..model.board import Reader

        reader = Reader(self.directory)
        while not self._leaving.is_set():
            self._newest = reader.poll()
            self.post_message(Polled())
            self._leaving.wait(POLL_SECONDS)

    async def on_polled(self) -> None:
        first, self.board = self.board is None, self._newest
        if first:
            await self.action_visit(self.visited)
        elif self.board is not None:
            self._panes[self.visited].show(self.board)

    async def action_visit(self, name: str) -> None:
        """Go to a screen, if this run has it."""
        board, cls = self.board, self._classes.get(name)
        if board is None or cls is None or not cls.available(board):
            return
        switcher = self.query_one(ContentSwitcher)
        if name not in self._panes:
            self._panes[name] = cls(id=name)
            await switcher.mount(self._panes[name])
        self.visited = switcher.current = name
        self._panes[name].show(board)

    async def action_next(self, by: int) -> None:
        """Go to the screen next to this one."""
        if self.board is None:
            return
        names = [name for name, cls in self._classes.items() if cls.available(self.board)]
        await self.action_visit(names[(names.index(self.visited) + by) % len(names)])
