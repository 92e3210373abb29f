"""What runs the tracker of `theirs`."""

import json
from pathlib import Path

from attrs import define

from xtrain.records.lines import Event, as_object
from xtrain.records.metrics import StepMetrics
from xtrain.runtime.base.ops import op
from xtrain.runtime.observe.records import Trackers


@op("setup.log.tally")
def tally(trackers: Trackers, file: str) -> None:
    trackers.begin(lambda run: TallyWriter(path=run.directory / file, step=run.step))


@define(eq=False, kw_only=True)
class TallyWriter:
    path: Path
    step: int
    name: str = "the tally"
    seconds: float = 10.0
    local: bool = True

    def begin(self) -> None:
        self._note("begin", {"step": self.step})

    def metric(self, record: StepMetrics) -> None:
        self._note("metric", as_object(record))

    def event(self, record: Event) -> None:
        self._note("event", as_object(record))

    def rest(self, *, must: bool) -> None: ...

    def end(self, exit_code: int) -> None:
        self._note("end", {"exit_code": exit_code})

    def _note(self, call: str, record: dict) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps([call, record]) + "\n")
