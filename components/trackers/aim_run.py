"""`setup.log.aim`: records for Aim."""

from importlib import import_module
from typing import Any

from xtrain.components.trackers._projects_run import End, ProjectWriter
from xtrain.lazy_attrs import define
from xtrain.runtime.base.ops import op
from xtrain.runtime.observe.records import Trackers


@op("setup.log.aim")
def log_to_aim(trackers: Trackers, project: str | None, name: str | None, tags: list[str], repo: str | None) -> None:
    """Log records to Aim, under the same run of Aim for all starts of this run."""
    chosen = {"project": project, "name": name, "tags": tags, "repo": repo, "folder": "aim"}
    trackers.begin(lambda run: AimWriter(context=run, chosen=chosen, name="Aim"))


@define(eq=False, kw_only=True)
class AimWriter(ProjectWriter):
    """A `RecordWriter` for Aim. Output and environment are not stored."""

    _library: Any = None
    _run: Any = None

    def open(self) -> None:
        self._library = import_module("aim")
        known = self.kept_id(lambda: self._opened(None).hash)
        self._run = self._run or self._opened(known)
        self._run.name = self.run_name
        self._run["settings"] = self.flat_settings()
        for tag in {*self.chosen["tags"]} - {*self._run.tags}:
            self._run.add_tag(tag)

    def _opened(self, known: str | None) -> Any:
        """Open a run of Aim, a new one for None."""
        self._run = self._library.Run(
            run_hash=known,
            repo=self.chosen["repo"],
            experiment=self.project,
            system_tracking_interval=None,
            log_system_params=False,
            capture_terminal_logs=False,
        )
        return self._run

    def numbers(self, values: dict[str, float], step: int, seconds: float) -> None:
        for name, value in values.items():
            self._run.track(value, name=name, step=step)

    def text(self, name: str, text: str, step: int) -> None:
        self._run.track(self._library.Text(text), name=name, step=step)

    def close(self, end: End) -> None:
        self._run.close()
