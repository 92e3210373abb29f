"""`log { swanlab { … } }`: SwanLab."""

from typing import ClassVar, Literal

from xtrain.components.trackers._projects import ProjectTracker
from xtrain.dsl.schema.run import TRACKERS
from xtrain.dsl.schema.setting import execution_setting
from xtrain.lazy_attrs import frozen


@TRACKERS.register()
@frozen
class SwanLab(ProjectTracker):
    """`swanlab { project = "…" }`: SwanLab, with the package `swanlab`; its files are in the run's `swanlab/`."""

    kind: ClassVar[str] = "swanlab"
    title = "SwanLab"
    package = "swanlab"
    install = "xtrain[swanlab]"

    workspace: str | None = execution_setting("workspace; none: the default one of the login", default=None)
    description: str | None = execution_setting("description of the run", default=None)
    mode: Literal["online", "local", "offline"] = execution_setting(
        "online; local: for its dashboard on this machine; offline: nothing is sent until `swanlab sync`",
        default="online",
    )

    def where(self) -> str:
        return "online" if self.mode == "online" else "in swanlab/"
