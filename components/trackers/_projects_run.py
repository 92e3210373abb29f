"""Writer that trackers of projects share: numbers by name at their step, samples as texts, files of the run."""

import secrets
from collections.abc import Callable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any, Final, Literal

from xtrain.lazy_attrs import define
from xtrain.records.lines import Event, as_object
from xtrain.records.metrics import StepMetrics
from xtrain.records.training_events import GenerateEvent
from xtrain.runtime.observe.records import TrackerContext

FINISH_SECONDS: Final = 60.0
# Exit code of a stop that can be resumed.
STOPPED: Final = 75
End = Literal["finished", "stopped", "failed"]


@define(eq=False, kw_only=True)
class ProjectWriter:
    """A `RecordWriter` for a tracker of projects, without its library. chosen: the settings of the tracker.

    A step that is repeated after a rollback or a resume is sent again at its step.
    """

    context: TrackerContext
    chosen: Mapping[str, Any]
    name: str
    seconds: float = FINISH_SECONDS
    local: bool = False

    def open(self) -> None:
        """Load the library and begin or continue the run."""
        raise NotImplementedError

    def numbers(self, values: dict[str, float], step: int, seconds: float) -> None:
        """Send numbers of a step. seconds: time of the record since 1970."""
        raise NotImplementedError

    def text(self, name: str, text: str, step: int) -> None:
        """Send a text of a step."""
        raise NotImplementedError

    def close(self, end: End) -> None:
        """Send what is left and end the run."""
        raise NotImplementedError

    # RecordWriter -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.open()

    def metric(self, record: StepMetrics) -> None:
        """Send all finite numbers of a record; lists have no place in these trackers."""
        values = {
            name: float(value)
            for name, value in as_object(record).items()
            if name not in ("step", "time") and isinstance(value, int | float) and isfinite(value)
        }
        self.numbers(values, record.step or 0, record.time or 0.0)

    def event(self, record: Event) -> None:
        if isinstance(record, GenerateEvent):
            for number, sample in enumerate(record.samples, start=1):
                self.text(f"generate/{number}", sample.prompt + sample.text, record.step or 0)

    def rest(self, *, must: bool) -> None:
        """Do nothing: these libraries write in threads or processes of their own."""

    def end(self, exit_code: int) -> None:
        self.close({0: "finished", STOPPED: "stopped"}.get(exit_code, "failed"))  # type: ignore[arg-type]

    # For the libraries ------------------------------------------------------------------------------------------------

    @property
    def project(self) -> str:
        return self.chosen["project"] or self.experiment

    @property
    def experiment(self) -> str:
        return str(self.context.settings["experiment"]["name"])

    @property
    def run_name(self) -> str:
        return self.chosen["name"] or f"{self.experiment} {self.context.directory.name}"

    @property
    def folder(self) -> Path:
        """Folder of the tracker in the run's directory."""
        folder = self.context.directory / self.chosen["folder"]
        folder.mkdir(exist_ok=True)
        return folder

    @property
    def files(self) -> list[Path]:
        """Spec and plan of the run."""
        paths = (self.context.directory / name for name in ("spec.xtrain", "plan.json"))
        return [path for path in paths if path.exists()]

    def flat_settings(self) -> dict[str, Any]:
        """Return every resolved setting by its path, `{"optimizer.lr": 0.0003, …}`, with the plan's ids."""
        plan = self.context.plan
        return {
            "plan_id": plan.id,
            "config_id": plan.config_id,
            **{entry.path: entry.value for entry in plan.provenance},
        }

    def kept_id(self, make: Callable[[], str] | None = None) -> str:
        """Return the id of the tracker's run, which all starts of this run share; `make` gives a new one."""
        path = self.folder / "run_id"
        if path.exists() and (known := path.read_text().strip()):
            return known
        new = secrets.token_hex(16) if make is None else make()
        path.write_text(f"{new}\n")
        return new
