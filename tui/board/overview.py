"""The first screen: is the run healthy, on plan, and when does it end."""

from typing import TYPE_CHECKING

from textual.app import ComposeResult
from textual.widgets import Static

from .pane import Pane

if TYPE_CHECKING:
    from ..model.board import Board


class OverviewPane(Pane):
    """The run in a few numbers, held against its plan."""

    title = "Overview"
    short = "Over"

    def compose(self) -> ComposeResult:
        yield Static(id="overview-state")

    def show(self, board: "Board") -> None:
        self.query_one(Static).update(f"step {board.run.step}")
