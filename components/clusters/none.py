"""`cluster none`."""

from xtrain.dsl.schema.cluster import CLUSTERS, Cluster
from xtrain.dsl.schema.component import named
from xtrain.lazy_attrs import frozen


@CLUSTERS.register()
@frozen
class NoCluster(Cluster):
    """`cluster none { … }`: no machines, so no estimates."""

    preset: str = named("none")

    known = False
