"""`stop`: end the run. It has no node: a tick or trigger of the plan stops the run."""

from typing import ClassVar

from xtrain.contracts.actions import PlannedAction
from xtrain.dsl.schema.actions import ACTIONS
from xtrain.lazy_attrs import frozen


@ACTIONS.register()
@frozen
class Stop(PlannedAction):
    """`stop`: end the run after this step; it can be resumed."""

    kind: ClassVar[str] = "stop"
    stops = True
    nan_limit = 1
