"""What every view of a run is asked to do; the base class does none of it, which is the view `none`."""

from xtrain.records.record import Record
from xtrain.tui.state import RunState


class Drawer:
    """Base class of views, which draw a run as its records arrive; draws nothing itself."""

    def shows(self, record: Record) -> bool:
        """Return True if `draw` wants this record, with the state right after it."""
        return False

    def draw(self, state: RunState, record: Record) -> None:
        """Show one record, which led to `state`."""

    def refresh(self, state: RunState) -> None:
        """Show what changes with time; called with every poll."""

    def close(self, state: RunState) -> None:
        """Show the outcome: the run is over, or nothing more is written."""

    def lost(self, state: RunState, why: str) -> None:
        """Show that no process is left to report how the run ends; why: the evidence."""
        self.close(state)

    def release(self) -> None:
        """Release the terminal without output after an interruption."""
