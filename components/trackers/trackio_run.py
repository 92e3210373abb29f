"""`setup.log.trackio`: records for Trackio."""

from importlib import import_module
from typing import Any

from xtrain.components.trackers._projects_run import End, ProjectWriter
from xtrain.lazy_attrs import define
from xtrain.runtime.base.ops import op
from xtrain.runtime.observe.records import Trackers


@op("setup.log.trackio")
def log_to_trackio(
    trackers: Trackers, project: str | None, name: str | None, tags: list[str], space: str | None
) -> None:
    """Log records to Trackio, under the same name for all starts of this run."""
    chosen = {"project": project, "name": name, "tags": tags, "space": space}
    trackers.begin(lambda run: TrackioWriter(context=run, chosen=chosen, name="Trackio"))


@define(eq=False, kw_only=True)
class TrackioWriter(ProjectWriter):
    """A `RecordWriter` for Trackio."""

    _library: Any = None
    _run: Any = None

    def open(self) -> None:
        self._library = import_module("trackio")
        config = {**self.flat_settings(), **({"tags": [*self.chosen["tags"]]} if self.chosen["tags"] else {})}
        self._run = self._library.init(
            project=self.project,
            name=self.run_name,
            space_id=self.chosen["space"],
            config=config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def numbers(self, values: dict[str, float], step: int, seconds: float) -> None:
        self._run.log(values, step=step)

    def text(self, name: str, text: str, step: int) -> None:
        self._run.log({name: self._library.Markdown(text)}, step=step)

    def close(self, end: End) -> None:
        self._run.finish()
