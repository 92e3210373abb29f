"""One instant of a run, for screens to draw."""

from collections.abc import Mapping
from pathlib import Path

from attrs import field, frozen

from xtrain.records.server_status import ServerStatus
from xtrain.records.sweep_state import SweepState
from xtrain.tui.model.alerts import Alert
from xtrain.tui.model.event_log import EventLog
from xtrain.tui.model.life import Life
from xtrain.tui.model.planned import Planned
from xtrain.tui.model.ranks import Ranks
from xtrain.tui.model.series import Series
from xtrain.tui.state import RunState

# Seconds that one poll may take: at four polls a second a twelfth of a core, while a long run is being opened.
BUDGET_SECONDS = 0.02
# The heartbeats of how many ranks are asked how far the run is.
ASKED = 64


@frozen(kw_only=True)
class Board:
    """Everything a screen draws. now: seconds since 1970, when the board was made. version: changes when anything but
    `now` does. loading: share of the metrics that has been read, from 0 to 1, while a long run is being opened.
    damaged: complete lines of metrics and events that are not records. server: status of a training server; None
    without one. sweep: the sweep of which the run is a trial. trials: numbers of its trials, by run."""

    directory: Path
    now: float
    version: int = 0
    run: RunState = field(factory=RunState)
    series: Series = field(factory=Series)
    ranks: Ranks = field(factory=Ranks)
    planned: Planned | None = None
    events: EventLog = field(factory=EventLog)
    alerts: tuple[Alert, ...] = ()
    life: Life = field(factory=Life)
    loading: float | None = None
    damaged: int = 0
    server: ServerStatus | None = None
    sweep: SweepState | None = None
    trials: Mapping[str, Series] = field(factory=dict)

    @property
    def step(self) -> int:
        """Completed optimizer steps, from records or heartbeats, whichever is further: not every step is logged."""
        # Ranks are never a step apart for long: a few of thousands do.
        beats = (each.beat.step - 1 for each in self.ranks.all[:ASKED] if each.beat is not None)
        return self.run.step if self.run.end is not None else max(self.run.step, *beats, 0)
