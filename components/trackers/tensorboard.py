"""`log { tensorboard = true }`: event files for TensorBoard."""

from collections.abc import Mapping
from typing import Any, ClassVar

from xtrain.contracts.actions import PlannedTracker
from xtrain.dsl.schema.run import TRACKERS
from xtrain.dsl.schema.setting import execution_setting
from xtrain.lazy_attrs import frozen


@TRACKERS.register()
@frozen
class TensorBoard(PlannedTracker):
    """`tensorboard = true`: event files in the run's `tensorboard/`, with the package `tensorboard`."""

    kind: ClassVar[str] = "tensorboard"
    title = "TensorBoard"
    package = "tensorboard"
    install = "xtrain[tensorboard]"

    @classmethod
    def in_log(cls) -> tuple[type, Any]:
        doc = "write TensorBoard event files to `tensorboard/` of the run; needs the package `tensorboard`"
        return bool, execution_setting(doc, default=False)

    @classmethod
    def chosen(cls, value: Any) -> "TensorBoard | None":
        return cls() if value else None

    def args(self) -> dict[str, Any]:
        return {"folder": "tensorboard"}

    def does(self) -> str:
        return "writes records for TensorBoard to tensorboard/"

    @classmethod
    def shown(cls, args: Mapping[str, Any]) -> str:
        return f"TensorBoard in {args['folder']}/"
