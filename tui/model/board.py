"""One instant of a run, for screens to draw, and the reader that makes it from the files of the run's directory."""

import time
from pathlib import Path

from attrs import field, frozen

from ..state import RunState
from .alerts import Alert
from .event_log import EventLog
from .life import Life
from .planned import Planned
from .ranks import Ranks
from .series import Series

# Seconds that one poll may take: at four polls a second a twelfth of a core, while a long run is being opened.
BUDGET_SECONDS = 0.02


@frozen(kw_only=True)
class Board:
    """Everything a screen draws. now: seconds since 1970, when it was made. version: changes when anything but `now`
    does. loading: the share of the metrics that has been read, from 0 to 1, while a long run is being opened."""

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


class Reader:
    """Reads on in the files of a run's directory, a bounded bit at a time. The directory may not exist yet, and may go
    away at any time; neither is an error."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def poll(self, budget_seconds: float = BUDGET_SECONDS) -> Board:
        """What is known now. Never raises because of the files."""
        return Board(directory=self.directory, now=time.time())
