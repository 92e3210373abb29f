"""`cluster none`."""

from attrs import frozen

from xtrain.dsl.schema.cluster import CLUSTERS, Cluster
from xtrain.dsl.schema.component import named


@CLUSTERS.register()
@frozen
class NoCluster(Cluster):
    """`cluster none { … }`: no machines, so no estimates."""

    preset: str = named("none")

    known = False
