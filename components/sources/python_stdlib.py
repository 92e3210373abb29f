"""`python_stdlib()`: text available wherever Python is."""

from collections.abc import Mapping
from typing import Any

from xtrain.contracts.data import PlannedSource
from xtrain.dsl.schema.data_components import SOURCES
from xtrain.lazy_attrs import frozen


@SOURCES.register()
@frozen
class PythonStdlib(PlannedSource):
    """`python_stdlib()`: the modules of Python's standard library, one document each."""

    kind = "python_stdlib"

    def does(self) -> str:
        return "Python's standard library"

    @classmethod
    def shown(cls, args: Mapping[str, Any]) -> str:
        return "Python's standard library"

    def identity(self, seed: int) -> Any:
        return "PythonStdlib()"
