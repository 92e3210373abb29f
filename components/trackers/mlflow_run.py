"""`setup.log.mlflow`: records for MLflow."""

from importlib import import_module
from typing import Any, Final

from xtrain.components.trackers._projects_run import End, ProjectWriter
from xtrain.lazy_attrs import define
from xtrain.runtime.base.ops import op
from xtrain.runtime.observe.records import Trackers

# Limits of MLflow's `log_batch`.
MOST_PARAMETERS: Final = 100
LONGEST_PARAMETER: Final = 6000
STATUS: Final[dict[End, str]] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


@op("setup.log.mlflow")
def log_to_mlflow(trackers: Trackers, project: str | None, name: str | None, tags: list[str], uri: str | None) -> None:
    """Log records to MLflow, under the same run of MLflow for all starts of this run."""
    chosen = {"project": project, "name": name, "tags": tags, "uri": uri, "folder": "mlflow"}
    trackers.begin(lambda run: MlflowWriter(context=run, chosen=chosen, name="MLflow"))


@define(eq=False, kw_only=True)
class MlflowWriter(ProjectWriter):
    """A `RecordWriter` for MLflow, by its client, which has no state of the process."""

    _client: Any = None
    _entities: Any = None
    _run: str = ""

    def open(self) -> None:
        uri = self.chosen["uri"]
        self._client = import_module("mlflow.tracking").MlflowClient(tracking_uri=uri)
        self._entities = import_module("mlflow.entities")
        self._run = self.kept_id(self._created)
        self._client.update_run(self._run, status="RUNNING")
        for path in self.files:
            self._client.log_artifact(self._run, str(path))

    def _created(self) -> str:
        """Create a run of MLflow with the settings as parameters; return its id."""
        known = self._client.get_experiment_by_name(self.project)
        experiment = self._client.create_experiment(self.project) if known is None else known.experiment_id
        tags = dict.fromkeys(self.chosen["tags"], "true")
        run = self._client.create_run(experiment, run_name=self.run_name, tags=tags).info.run_id
        settings = [(name, str(value)[:LONGEST_PARAMETER]) for name, value in self.flat_settings().items()]
        for first in range(0, len(settings), MOST_PARAMETERS):
            part = settings[first : first + MOST_PARAMETERS]
            self._client.log_batch(run, params=[self._entities.Param(name, value) for name, value in part])
        return run

    def numbers(self, values: dict[str, float], step: int, seconds: float) -> None:
        made, at = self._entities.Metric, int(seconds * 1000)
        self._client.log_batch(self._run, metrics=[made(name, value, at, step) for name, value in values.items()])

    def text(self, name: str, text: str, step: int) -> None:
        self._client.log_text(self._run, text, f"{name}-step{step}.txt")

    def close(self, end: End) -> None:
        self._client.set_terminated(self._run, status=STATUS[end])
