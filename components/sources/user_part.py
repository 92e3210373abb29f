"""A source that is a user-defined function."""

from collections.abc import Mapping
from typing import Any

from xtrain.contracts.data import PlannedSource
from xtrain.dsl.schema.component import UserComponent
from xtrain.dsl.schema.data_components import SOURCES
from xtrain.lazy_attrs import frozen


@SOURCES.user
@frozen
class UserSource(UserComponent, PlannedSource):
    """`NAME(…)`: texts or records yielded by a function of your own."""

    kind = "python"
    records = "fields"
    has_lists = True
    beside_spec = True
    # Different code may yield the same records.
    may_agree = ("digest", "module", "function")
    former_options = ("module", "function", "digest", "arguments")

    def options(self, seed: int) -> dict[str, Any]:
        return self.call()

    def does(self) -> str:
        return f"documents of {self.function}() of {self.module}"

    @classmethod
    def shown(cls, args: Mapping[str, Any]) -> str:
        options = args["options"]
        return f"{options['function']}() of {options['module']}"

    def identity(self, seed: int) -> Any:
        return self.identified()
