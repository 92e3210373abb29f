"""`launcher local`: this machine."""

from xtrain.contracts.actions import PlannedLauncher
from xtrain.dsl.schema.cluster import LAUNCHERS
from xtrain.dsl.schema.component import named
from xtrain.lazy_attrs import frozen


@LAUNCHERS.register()
@frozen
class LocalLauncher(PlannedLauncher):
    """`launcher local { }`: this machine, in the background: the run continues when the terminal is closed."""

    kind: str = named("local")
    alone = True
