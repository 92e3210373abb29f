"""The screens of the dashboard in the order of their keys; nothing of them is loaded before one is asked for."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xtrain.tui.board.pane import Pane

# Name (as of `--screen`) → the module of this package and its class.
SCREENS = {
    "overview": ("overview", "OverviewPane"),
    "plan": ("plan", "PlanPane"),
    "ranks": ("ranks", "RanksPane"),
    "experts": ("experts", "ExpertsPane"),
    "datasets": ("datasets", "DatasetsPane"),
    "events": ("events", "EventsPane"),
    "compare": ("compare", "ComparePane"),
    "server": ("server", "ServerPane"),
    "sweep": ("sweep", "SweepPane"),
}


def pane_classes() -> "dict[str, type[Pane]]":
    """Every screen's class by its name."""
    return {name: getattr(import_module(f"{__package__}.{module}"), cls) for name, (module, cls) in SCREENS.items()}
