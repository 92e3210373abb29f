"""`log { mlflow { … } }`: MLflow."""

from typing import ClassVar

from xtrain.components.trackers._projects import ProjectTracker
from xtrain.dsl.schema.run import TRACKERS
from xtrain.dsl.schema.setting import execution_setting
from xtrain.lazy_attrs import frozen


@TRACKERS.register()
@frozen
class Mlflow(ProjectTracker):
    """`mlflow { project = "…" }`: MLflow, with the package `mlflow` or `mlflow-skinny`; a project is its experiment."""

    kind: ClassVar[str] = "mlflow"
    title = "MLflow"
    package = "mlflow"
    install = "xtrain[mlflow]"

    uri: str | None = execution_setting(
        "tracking server or store; none: `MLFLOW_TRACKING_URI`, or else MLflow's store in the working folder",
        default=None, example='"http://tracking:5000"',
    )  # fmt: skip

    def where(self) -> str:
        return "in the store of MLFLOW_TRACKING_URI, or a local one" if self.uri is None else f"in {self.uri}"
