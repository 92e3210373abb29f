"""Reads the metrics of all trials of a sweep, for their curves."""

import time
from pathlib import Path
from typing import Final

from xtrain.records.paths import METRICS_FILE
from xtrain.records.sweep_state import SweepState
from xtrain.tui.model.metrics import Metrics
from xtrain.tui.model.series import Series

# Bytes of the columns of one trial: for a long one, drawn columns are kept, and a sketch of the others.
TRIAL_BYTES: Final = 4 << 20
# Seconds between two reads of a trial that is not training: its metrics no longer change.
REST_SECONDS: Final = 10.0


class TrialCurves:
    """Curves of the trials of the sweep in a folder. All polls must come from one thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._readers: dict[str, Metrics] = {}
        self._looked: dict[str, float] = {}
        self.series: dict[str, Series] = {}
        """Series of the trials' runs, by name of the run; each is changed in place."""

    @property
    def version(self) -> int:
        """Changes whenever a curve does."""
        return len(self.series) + sum(each.version for each in self.series.values())

    def poll(self, sweep: SweepState, deadline: float) -> None:
        """Read until `deadline` (`time.monotonic()`), starting with the trial read longest ago."""
        now = time.monotonic()
        going = {each.name for each in sweep.trials.values() if each.status == "training"}
        names = (each.name for each in sweep.trials.values() if each.same_as is None and not each.reason)
        pause = {name: 0.0 if name in going else REST_SECONDS for name in names}
        due = [name for name, seconds in pause.items() if self._unread(name) or now - self._looked[name] >= seconds]
        for name in sorted(due, key=lambda name: self._looked.get(name, 0.0)):
            if name not in self._readers:
                self.series = {**self.series, name: Series(TRIAL_BYTES)}
                self._readers[name] = Metrics(self._folder / name / METRICS_FILE, self.series[name])
            self._readers[name].poll(deadline)
            self._looked[name] = time.monotonic()
            if self._looked[name] >= deadline:
                return

    def _unread(self, name: str) -> bool:
        return name not in self._looked or self._readers[name].loading is not None
