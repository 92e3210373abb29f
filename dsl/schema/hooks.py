"""Functions of the user's own that a run calls: `hook` beside its nodes, `step` and `evaluation_step`."""

from typing import Any

from attrs import frozen

from xtrain.dsl.schema.component import UserComponent
from xtrain.dsl.schema.names import file_name
from xtrain.dsl.schema.setting import label


@frozen
class Hook(UserComponent):
    """`hook NAME { … }`: a function of your own with `@hook`, called at its place in a run; hooks of one place in the
    order of the spec. Its settings are the parameters of the function."""

    name: str = label(check=file_name)

    def args(self) -> dict[str, Any]:
        """The JSON arguments of its node."""
        return {"user": self.call(), **self.declared}


@frozen
class StepBody(UserComponent):
    """`step NAME { … }`: a function of your own with `@step`, in place of the forward and backward of a step. Its
    settings are the parameters of the function."""

    name: str = label(check=file_name)


@frozen
class EvaluationBody(UserComponent):
    """`evaluation_step NAME { … }`: a function of your own with `@evaluation_step`, in place of the forward of
    evaluations. Its settings are the parameters of the function."""

    name: str = label(check=file_name)
