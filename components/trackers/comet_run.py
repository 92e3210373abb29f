"""`setup.log.comet`: records for Comet."""

from importlib import import_module
from typing import Any

from xtrain.components.trackers._projects_run import End, ProjectWriter
from xtrain.lazy_attrs import define
from xtrain.runtime.base.ops import op
from xtrain.runtime.observe.records import Trackers


@op("setup.log.comet")
def log_to_comet(
    trackers: Trackers, project: str | None, name: str | None, tags: list[str], workspace: str | None, mode: str
) -> None:
    """Log records to Comet, under the same experiment of Comet for all starts of this run."""
    chosen = {"project": project, "name": name, "tags": tags, "workspace": workspace, "mode": mode, "folder": "comet"}
    trackers.begin(lambda run: CometWriter(context=run, chosen=chosen, name="Comet"))


@define(eq=False, kw_only=True)
class CometWriter(ProjectWriter):
    """A `RecordWriter` for Comet. Code, git state, output and environment are not sent."""

    _experiment: Any = None

    def open(self) -> None:
        library = import_module("comet_ml")
        config = library.ExperimentConfig(
            name=self.run_name,
            tags=[*self.chosen["tags"]],
            offline_directory=str(self.folder),
            log_code=False,
            log_graph=False,
            log_git_metadata=False,
            log_git_patch=False,
            log_env_details=False,
            auto_metric_logging=False,
            auto_param_logging=False,
            auto_output_logging=False,
            auto_histogram_weight_logging=False,
            parse_args=False,
            display_summary_level=0,
        )
        self._experiment = library.start(
            workspace=self.chosen["workspace"],
            project_name=self.project,
            experiment_key=self.kept_id(),
            mode="get_or_create",
            online=self.chosen["mode"] == "online",
            experiment_config=config,
        )
        self._experiment.log_parameters(self.flat_settings())
        for path in self.files:
            self._experiment.log_asset(str(path), overwrite=True)

    def numbers(self, values: dict[str, float], step: int, seconds: float) -> None:
        self._experiment.log_metrics(values, step=step)

    def text(self, name: str, text: str, step: int) -> None:
        self._experiment.log_text(text, step=step, metadata={"name": name})

    def close(self, end: End) -> None:
        self._experiment.end()
