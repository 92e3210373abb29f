"""`cluster other`."""

from attrs import frozen

from xtrain.dsl.schema.cluster import CLUSTERS, Cluster
from xtrain.dsl.schema.component import named


@CLUSTERS.register()
@frozen
class Other(Cluster):
    """`cluster other { … }`: machines described by the settings, as far as they are known."""

    preset: str = named("other")
