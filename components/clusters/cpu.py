"""`cluster cpu`."""

from attrs import frozen

from xtrain.dsl.schema.cluster import CLUSTERS, Cluster
from xtrain.dsl.schema.component import named


@CLUSTERS.register()
@frozen
class Cpu(Cluster):
    """`cluster cpu { … }`: machines without accelerators; a rank is a process."""

    preset: str = named("cpu")

    device = "cpu"
