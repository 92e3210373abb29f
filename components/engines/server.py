"""`engine server { … }`: `xtrain serve` samples."""

from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.policy import ENGINES, SamplingEngine
from xtrain.lazy_attrs import frozen


@ENGINES.register()
@frozen
class ServerEngine(SamplingEngine):
    """`engine server { … }`: an `xtrain serve` elsewhere that samples, of the same model: with an adapter of at least
    this rank, or with `mode = full`."""

    kind: str = named("server")

    title = "xtrain serve"
    reads_files = False
    keeps_models = True
