"""How the work is spread over ranks: `parallel` with its axes."""

from typing import Literal

from attrs import frozen

from .setting import AUTO, Auto, Role, at_least, setting


@frozen
class Tp:
    """`tp N { … }`: tensor parallel."""

    size: int = 1
    sequence: bool = setting("keep activations between blocks sharded by sequence", default=True, role=Role.MESH)
    loss: bool = setting("compute the loss on logits sharded by vocabulary", default=True, role=Role.MESH)


@frozen
class Ep:
    """`ep N`: expert parallel, laid over the ranks of fsdp · ring · ulysses · tp."""

    size: int = 1


@frozen
class Fsdp:
    """`fsdp N { … }` or `fsdp auto`: parameters, gradients and optimizer state sharded over data ranks."""

    size: int | Auto = AUTO
    replicate: int = setting("copies of the sharded model (HSDP)", default=1, check=at_least(1), role=Role.MESH)
    reduce: Literal["auto", "fp32", "fp64", "bf16"] = setting(
        "format in which gradients are summed; auto: that of the parameters", default="auto", role=Role.EXECUTION
    )
    reshard: bool = setting("free gathered parameters between forward and backward", default=True, role=Role.MESH)


@frozen
class Pp:
    """`pp N { … }`: pipeline of stages."""

    size: int = 1
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"] = setting(
        "order of forwards and backwards", default="1f1b", role=Role.MESH
    )
    stages_per_rank: int = setting("stages on one rank", default=1, check=at_least(1), role=Role.MESH)


@frozen
class Cp:
    """`cp N { … }`: context parallel, the sequence of a row spread over ring · ulysses ranks."""

    size: int = 1
    ring: int | Auto = setting(
        "ranks that pass keys and values around; auto: what ulysses leaves of the size",
        default=AUTO,
        check=at_least(1),
        role=Role.MESH,
    )
    ulysses: int | Auto = setting(
        "ranks that exchange sequence for heads; auto: as many as the heads allow",
        default=AUTO,
        check=at_least(1),
        role=Role.MESH,
    )
    fold: Literal["all", "ulysses_only", "ring_only", "none"] = setting(
        "context axes that shard parameters together with fsdp", default="all", role=Role.MESH
    )


@frozen
class Parallel:
    """`parallel { … }`: the size of each axis; an axis that is not named is 1, but fsdp, which is auto."""

    tp: Tp = setting("tensor parallel", default=Tp(), role=Role.MESH)
    ep: Ep = setting("expert parallel", default=Ep(), role=Role.MESH)
    fsdp: Fsdp = setting("sharded data parallel", default=Fsdp(), role=Role.MESH)
    pp: Pp = setting("pipeline parallel", default=Pp(), role=Role.MESH)
    cp: Cp = setting("context parallel", default=Cp(), role=Role.MESH)
