"""`cluster other`."""

from xtrain.dsl.schema.cluster import CLUSTERS, Cluster
from xtrain.dsl.schema.component import named
from xtrain.lazy_attrs import frozen


@CLUSTERS.register()
@frozen
class Other(Cluster):
    """`cluster other { … }`: machines described by the settings, as far as they are known."""

    preset: str = named("other")
