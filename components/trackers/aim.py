"""`log { aim { … } }`: Aim."""

from typing import ClassVar

from xtrain.components.trackers._projects import ProjectTracker
from xtrain.dsl.schema.run import TRACKERS
from xtrain.dsl.schema.setting import execution_setting
from xtrain.lazy_attrs import frozen


@TRACKERS.register()
@frozen
class Aim(ProjectTracker):
    """`aim { project = "…" }`: Aim, with the package `aim`; a project is an experiment of Aim."""

    kind: ClassVar[str] = "aim"
    title = "Aim"
    package = "aim"
    install = "xtrain[aim]"

    repo: str | None = execution_setting(
        "folder or address of the repository of Aim; none: `.aim` of the working folder", default=None,
        example='"aim://tracking:53800"',
    )  # fmt: skip

    def where(self) -> str:
        return "in the repository .aim" if self.repo is None else f"in {self.repo}"
