"""`setup.log.swanlab`: records for SwanLab."""

from importlib import import_module
from typing import Any, Final

from xtrain.components.trackers._projects_run import End, ProjectWriter
from xtrain.lazy_attrs import define
from xtrain.runtime.base.ops import op
from xtrain.runtime.observe.records import Trackers

STATES: Final[dict[End, str]] = {"finished": "success", "stopped": "aborted", "failed": "crashed"}


@op("setup.log.swanlab")
def log_to_swanlab(
    trackers: Trackers,
    project: str | None,
    name: str | None,
    tags: list[str],
    workspace: str | None,
    description: str | None,
    mode: str,
) -> None:
    """Log records to SwanLab; online under the same run of SwanLab for all starts of this run."""
    chosen = {
        "project": project, "name": name, "tags": tags, "workspace": workspace, "description": description,
        "mode": mode, "folder": "swanlab",
    }  # fmt: skip
    trackers.begin(lambda run: SwanLabWriter(context=run, chosen=chosen, name="SwanLab"))


@define(eq=False, kw_only=True)
class SwanLabWriter(ProjectWriter):
    """A `RecordWriter` for SwanLab. Output, hardware and git state are not sent."""

    _library: Any = None
    _run: Any = None

    def open(self) -> None:
        self._library = import_module("swanlab")
        online, settings = self.chosen["mode"] == "online", self._library.Settings
        self._run = self._library.init(
            project=self.project,
            name=self.run_name,
            tags=[*self.chosen["tags"]] or None,
            workspace=self.chosen["workspace"],
            description=self.chosen["description"],
            mode=self.chosen["mode"],
            log_dir=str(self.folder),
            config=self.flat_settings(),
            settings=settings(
                interactive=False,
                terminal=settings.Terminal(proxy_type="none"),
                probe=settings.Probe(hardware=False, runtime=False, requirements=False, git=False, monitor=False),
            ),
            **({"id": self.kept_id(), "resume": "allow"} if online else {}),  # others have no runs to continue
        )

    def numbers(self, values: dict[str, float], step: int, seconds: float) -> None:
        self._run.log(values, step=step)

    def text(self, name: str, text: str, step: int) -> None:
        self._run.log({name: self._library.Text(text)}, step=step)

    def close(self, end: End) -> None:
        self._run.finish(state=STATES[end], **({"error": "the run failed"} if end == "failed" else {}))
