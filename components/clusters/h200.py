"""`cluster h200 { … }`: by NVIDIA's data sheet of H200 SXM."""

from xtrain.dsl.schema.cluster import CLUSTERS, Cluster, DeviceSheet
from xtrain.dsl.schema.component import named
from xtrain.lazy_attrs import frozen
from xtrain.plan.hardware import PEAKS


@CLUSTERS.register()
@frozen
class H200(Cluster):
    """`cluster h200 { … }`: machines with H200 SXM; a network of 400 Gb/s a device."""

    preset: str = named("h200")

    device = "cuda"
    # Half of NVLink's figure, which counts both directions.
    sheet = DeviceSheet(
        memory=140 * 2**30, flops=PEAKS["H200 SXM"], link=450e9, network=50e9, capability=9, bandwidth=4.8e12
    )

    @classmethod
    def fits(cls, kind: str, name: str) -> bool:
        return "h200" in name.lower()
