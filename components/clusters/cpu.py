"""`cluster cpu`."""

from xtrain.dsl.schema.cluster import CLUSTERS, Cluster
from xtrain.dsl.schema.component import named
from xtrain.lazy_attrs import frozen


@CLUSTERS.register()
@frozen
class Cpu(Cluster):
    """`cluster cpu { … }`: machines without accelerators; a rank is a process."""

    preset: str = named("cpu")

    device = "cpu"
