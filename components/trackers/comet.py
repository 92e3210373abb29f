"""`log { comet { … } }`: Comet."""

from typing import ClassVar, Literal

from xtrain.components.trackers._projects import ProjectTracker
from xtrain.dsl.schema.run import TRACKERS
from xtrain.dsl.schema.setting import execution_setting
from xtrain.lazy_attrs import frozen


@TRACKERS.register()
@frozen
class Comet(ProjectTracker):
    """`comet { project = "…" }`: Comet, with the package `comet_ml`; offline archives are in the run's `comet/`."""

    kind: ClassVar[str] = "comet"
    title = "Comet"
    package = "comet_ml"
    install = "xtrain[comet]"

    workspace: str | None = execution_setting("workspace; none: the default one of the login", default=None)
    mode: Literal["online", "offline"] = execution_setting(
        "online, or offline: nothing is sent until `comet upload`", default="online"
    )

    def where(self) -> str:
        return "online" if self.mode == "online" else "in comet/"
