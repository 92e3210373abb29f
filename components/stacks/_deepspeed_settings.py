"""`parallel { deepspeed { … } }`: settings of DeepSpeed's engine."""

from typing import Final, Literal

from attrs import frozen

from xtrain.dsl.schema.parallel import StackSettings
from xtrain.dsl.schema.setting import Range, Role, setting

Place = Literal["none", "cpu", "nvme"]
OFFLOADING: Final = ("offload_optimizer", "offload_param")


@frozen
class DeepspeedSettings(StackSettings):
    """`deepspeed { … }`: the state sharded over ranks under `stack = deepspeed`, and where a rank keeps its shard."""

    stage: int = setting(
        "stage of ZeRO: 0 cuts nothing, 1 the state of the optimizer, 2 also gradients, 3 also parameters",
        default=2,
        check=Range(low=0, high=3),
        role=Role.MESH,
        added=True,
    )
    offload_optimizer: Place = setting(
        "where a rank keeps and updates its piece of weights and moments, from stage 1 on; none: on its device, cpu: "
        "in host memory, nvme: in files of `nvme_path`, in stage 3",
        default="none",
        role=Role.MESH,
        added=True,
    )
    offload_param: Place = setting(
        "where a rank keeps its piece of the parameters that it computes with, in stage 3; none: on its device, cpu: "
        "in host memory, nvme: in files of `nvme_path`",
        default="none",
        role=Role.MESH,
        added=True,
    )
    nvme_path: str | None = setting(
        "folder on a disk of each machine, for what is offloaded to nvme; a run has a folder of its own in it",
        default=None,
        role=Role.MESH,
        added=True,
    )
    pin_memory: bool = setting(
        "whether host memory of what is offloaded is locked, as copies beside the computation need; "
        "`ulimit -l` has to allow it",
        default=True,
        role=Role.MESH,
        added=True,
    )

    @property
    def offloading(self) -> dict[str, str]:
        """Enabled settings of `OFFLOADING`, with their targets."""
        return {name: place for name in OFFLOADING if (place := getattr(self, name)) != "none"}
