"""The screens of the dashboard in the order of their keys; nothing of them is loaded before one is asked for."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xtrain.tui.board.pane import Pane

# Name (as of `--screen`) → its module and class.
SCREENS = {
    "overview": ("xtrain.tui.board.overview", "OverviewPane"),
    "plan": ("xtrain.tui.board.plan", "PlanPane"),
    "ranks": ("xtrain.tui.board.ranks", "RanksPane"),
    "experts": ("xtrain.tui.board.experts", "ExpertsPane"),
    "datasets": ("xtrain.tui.board.datasets", "DatasetsPane"),
    "events": ("xtrain.tui.board.events", "EventsPane"),
    "compare": ("xtrain.tui.board.compare", "ComparePane"),
    "server": ("xtrain.tui.board.server", "ServerPane"),
    "sweep": ("xtrain.tui.board.sweep", "SweepPane"),
}


def pane_classes() -> "dict[str, type[Pane]]":
    """Return every screen's class by its name."""
    return {name: getattr(import_module(module), cls) for name, (module, cls) in SCREENS.items()}
