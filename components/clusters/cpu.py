"""`cluster cpu`."""

from attrs import frozen

from ...dsl.schema.cluster import CLUSTERS, Cluster
from ...dsl.schema.component import named


@CLUSTERS.register()
@frozen
class Cpu(Cluster):
    """`cluster cpu { … }`: machines without accelerators; a rank is a process."""

    preset: str = named("cpu")

    device = "cpu"
