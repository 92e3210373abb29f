"""`cluster h100 { … }`: by NVIDIA's data sheet of H100 SXM."""

from xtrain.dsl.schema.cluster import CLUSTERS, Cluster, DeviceSheet
from xtrain.dsl.schema.component import named
from xtrain.lazy_attrs import frozen
from xtrain.plan.hardware import PEAKS


@CLUSTERS.register()
@frozen
class H100(Cluster):
    """`cluster h100 { … }`: machines with H100 SXM; a network of 400 Gb/s a device."""

    preset: str = named("h100")

    device = "cuda"
    # Half of NVLink's figure, which counts both directions.
    sheet = DeviceSheet(
        memory=80 * 2**30, flops=PEAKS["H100 SXM"], link=450e9, network=50e9, capability=9, bandwidth=3.35e12
    )

    @classmethod
    def fits(cls, kind: str, name: str) -> bool:
        return "h100" in name.lower()
