"""`cluster b200 { … }`: by NVIDIA's data sheet of HGX B200."""

from xtrain.dsl.schema.cluster import CLUSTERS, Cluster, DeviceSheet
from xtrain.dsl.schema.component import named
from xtrain.lazy_attrs import frozen
from xtrain.plan.hardware import PEAKS


@CLUSTERS.register()
@frozen
class B200(Cluster):
    """`cluster b200 { … }`: machines with B200 of HGX B200; a network of 400 Gb/s a device."""

    preset: str = named("b200")

    device = "cuda"
    # Half of NVLink's figure, which counts both directions.
    sheet = DeviceSheet(
        memory=179 * 2**30, flops=PEAKS["B200"], link=900e9, network=50e9, capability=10, bandwidth=8e12
    )

    @classmethod
    def fits(cls, kind: str, name: str) -> bool:
        return "b200" in name.lower()
