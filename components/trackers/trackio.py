"""`log { trackio { … } }`: Trackio."""

from typing import ClassVar

from xtrain.components.trackers._projects import ProjectTracker
from xtrain.dsl.schema.run import TRACKERS
from xtrain.dsl.schema.setting import execution_setting
from xtrain.lazy_attrs import frozen


@TRACKERS.register()
@frozen
class Trackio(ProjectTracker):
    """`trackio { project = "…" }`: Trackio, with the package `trackio`; `trackio show` opens its dashboard."""

    kind: ClassVar[str] = "trackio"
    title = "Trackio"
    package = "trackio"
    install = "xtrain[trackio]"

    space: str | None = execution_setting(
        "name of the Hugging Face Space that gets the records; none: the local folder of Trackio", default=None,
        example='"team/training"',
    )  # fmt: skip

    def where(self) -> str:
        return "in the local folder of Trackio" if self.space is None else f"in the space {self.space}"
