"""`cluster a100 { … }`: by NVIDIA's data sheet of A100 SXM 80 GB."""

from xtrain.dsl.schema.cluster import CLUSTERS, Cluster, DeviceSheet
from xtrain.dsl.schema.component import named
from xtrain.lazy_attrs import frozen
from xtrain.plan.hardware import PEAKS


@CLUSTERS.register()
@frozen
class A100(Cluster):
    """`cluster a100 { … }`: machines with A100 SXM of 80 GB; a network of 200 Gb/s a device."""

    preset: str = named("a100")

    device = "cuda"
    # Half of NVLink's figure, which counts both directions.
    sheet = DeviceSheet(
        memory=80 * 2**30, flops=PEAKS["A100"], link=300e9, network=25e9, capability=8, bandwidth=2.039e12
    )

    @classmethod
    def fits(cls, kind: str, name: str) -> bool:
        return "a100" in name.lower()
