"""`parallel { deepspeed { … } }`: settings of DeepSpeed's engine."""

from typing import Final, Literal

from xtrain.dsl.schema.parallel import StackSettings
from xtrain.dsl.schema.setting import Range, mesh_setting
from xtrain.lazy_attrs import frozen

Place = Literal["none", "cpu", "nvme"]
OFFLOADING: Final = ("offload_optimizer", "offload_param")


@frozen
class DeepspeedSettings(StackSettings):
    """`deepspeed { … }`: the state sharded over ranks under `stack = deepspeed`, and where a rank keeps its shard."""

    stage: int = mesh_setting(
        "ZeRO stage: 0 shards nothing, 1 the optimizer state, 2 also gradients, 3 also parameters",
        default=2,
        check=Range(low=0, high=3),
        added=True,
    )
    offload_optimizer: Place = mesh_setting(
        "where a rank stores and updates its shard of weights and moments, from stage 1 on; none: on its device, cpu: "
        "in host memory, nvme: in files of `nvme_path`, in stage 3",
        default="none",
        added=True,
    )
    offload_param: Place = mesh_setting(
        "where a rank stores its shard of the parameters, in stage 3; none: on its device, cpu: in host memory, nvme: "
        "in files of `nvme_path`",
        default="none",
        added=True,
    )
    nvme_path: str | None = mesh_setting(
        "folder on a disk of each machine for offloading to nvme; each run has its own folder inside",
        default=None,
        added=True,
    )
    pin_memory: bool = mesh_setting(
        "lock host memory of offloaded tensors, so that copies overlap with computation; `ulimit -l` must allow it",
        default=True,
        added=True,
    )

    @property
    def offloading(self) -> dict[str, str]:
        """Enabled settings of `OFFLOADING`, with their targets."""
        return {name: place for name in OFFLOADING if (place := getattr(self, name)) != "none"}
