"""`skip`: skip bad steps. It has no node: the step checks its own numbers, and the limit ends the run."""

from typing import ClassVar

from xtrain.contracts.actions import PlannedAction
from xtrain.dsl.schema.actions import ACTIONS
from xtrain.lazy_attrs import frozen


@ACTIONS.register()
@frozen
class Skip(PlannedAction):
    """`skip`: skip steps with a non-finite loss or gradient norm, and fail at the n-th in a row."""

    kind: ClassVar[str] = "skip"
    example = "on nan {}"
    only_nan = True
    nan_limit = 10
    skips = True
