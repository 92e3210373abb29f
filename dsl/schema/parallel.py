"""Distribution over ranks: `parallel` with its axes and execution stacks, `activation`, `compile`."""

from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, Final, Literal

from attrs import fields

from xtrain.dsl.schema.component import Component, Registry
from xtrain.dsl.schema.setting import (
    AUTO,
    Auto,
    Role,
    at_least,
    component_name,
    not_negative,
    rank_count,
    setting,
)
from xtrain.lazy_attrs import frozen

STACKS: Final = Registry["Stack"]("stack", "stacks", contract="xtrain.contracts.stacks.PlannedStack")
PREFIX: Final = "setup.parallel."


@frozen
class StackSettings:
    """`NAME { … }` inside `parallel`: the settings of the stack NAME."""


@STACKS.base
@frozen
class Stack(Component):
    """`stack = NAME`: how the model is spread over ranks, and how its gradients are summed. Stacks subclass
    `PlannedStack` (`contracts/stacks.py`)."""

    unsupported: ClassVar[Mapping[str, str]] = {}
    """Unsupported feature → what the stack does instead, as a clause after its name. Features: axes (`tp`, `pp`, `cp`,
    `ep`, `fsdp`), settings of fsdp (`reduce`, `reshard`, `sync`, `prefetch`, `offload`), and `compute`, a separate
    compute format."""
    uses_fsdp: ClassVar[bool] = False
    """True if the model is divided into FSDP units, which determine memory and the nodes of a step."""
    buckets: ClassVar[bool] = False
    """True if gradients are reduced in buckets, which take as many bytes as the gradients."""
    beside: ClassVar[tuple[str, ...]] = ()
    """Nodes whose collectives overlap with the computation of blocks; all others are waited for."""
    groups: ClassVar[bool] = False
    """True if the replicas of the model (`replicate`) are replica groups: each has a process group of its own, and may
    stop and restart while the others train. Its own node has `replicas`, their number."""
    settings: ClassVar[type[StackSettings] | None] = None
    """Class of the block in `parallel` with the name of the stack."""
    package: ClassVar[str] = ""
    """Package that it requires."""
    install: ClassVar[str] = ""
    """Argument of `pip install` for that package."""
    looks_at_machine: ClassVar[bool] = False
    """True if it may need more of a machine than that package. `check_machine` of its `…_run` module then gets
    `launch.device` and the arguments of its own node by name; it builds nothing, and raises EnvironmentFault."""
    resuming: ClassVar[Mapping[str, str]] = {}
    """Argument of its own node → effect of another value on a resumed run, as a clause; empty if other arguments, or
    the batch, say the same."""

    @classmethod
    def wraps(cls) -> bool:
        """Return True if the stack has a node that wraps the model."""
        return False

    @classmethod
    def node(cls) -> str:
        """Return the id and op of its own node."""
        return f"{PREFIX}{cls.kind}"


def stack_of_node(op: str) -> type[Stack] | None:
    """Return the stack whose own node has this op; None for stacks that wrap nothing."""
    found = STACKS.get(op.removeprefix(PREFIX)) if op.startswith(PREFIX) else None
    return None if found is None or not found.wraps() else found


def stack_of_step(op: str) -> type[Stack] | None:
    """Return the stack that has this op in its steps: `step.NAME.…`."""
    kind, *names = op.split(".")
    return STACKS.get(names[0]) if kind == "step" and len(names) > 1 else None


@frozen
class Tp:
    """`tp N { … }`: tensor parallel."""

    size: int = 1
    sequence: bool = setting("keep activations between blocks sharded by sequence", default=True, role=Role.MESH)
    loss: bool = setting("compute the loss on logits sharded by vocabulary", default=True, role=Role.MESH)
    overlap: bool = setting(
        "multiply shard by shard while shards travel between ranks; in compiled blocks on cuda",
        default=False,
        role=Role.EXECUTION,
        added=True,
    )


@frozen
class Ep:
    """`ep N`: expert parallel; adds no ranks, but reuses the ranks of fsdp · ring · ulysses · tp."""

    size: int = 1


@frozen
class Fsdp:
    """`fsdp N { … }` or `fsdp auto`: parameters, gradients and optimizer state sharded over data ranks."""

    size: int | Auto = AUTO
    replicate: int = setting(
        "number of replicas of the sharded model (HSDP)", default=1, check=rank_count, role=Role.MESH
    )
    reduce: Literal["auto", "fp32", "fp64", "bf16"] = setting(
        "format in which fsdp sums gradients; auto: the parameters' format", default="auto", role=Role.EXECUTION
    )
    reshard: bool | Auto = setting(
        "free the gathered parameters of a block between forward and backward; auto: if parameters are sharded, "
        "without a pipeline",
        default=AUTO,
        role=Role.MESH,
    )
    sync: Literal["auto", "step", "microbatch"] = setting(
        "when gradients are reduced: once per step, unsharded until then, or after every microbatch; auto: "
        "microbatch if a step has several, none is in a pipeline, parameters are sharded, and whole gradients exceed "
        "1 GiB",
        default="auto",
        role=Role.MESH,
    )
    prefetch: bool | Auto = setting(
        "gather the parameters of the next unit during the forward of the current one; auto: if the host waits in "
        "a forward, as for the rows of each expert",
        default=AUTO,
        role=Role.MESH,
        added=True,
    )
    offload: bool = setting(
        "keep parameters, gradients and optimizer state in host memory; on cuda only", default=False, role=Role.MESH
    )


@frozen
class Pp:
    """`pp N { … }`: pipeline parallel."""

    size: int = 1
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv"] = setting(
        "pipeline schedule: the order of forwards and backwards", default="1f1b", role=Role.MESH
    )
    stages_per_rank: int | Auto = setting(
        "stages on one rank; auto: 2 for interleaved_1f1b and zbv, else 1",
        default=AUTO,
        check=at_least(1),
        role=Role.MESH,
    )
    layers: tuple[int, ...] | Auto = setting(
        "layers of each stage, in pipeline order; auto: as even as the costs below allow",
        default=AUTO,
        role=Role.MESH,
    )
    embedding_cost: float | Auto = setting(
        "cost of the embedding when stages are balanced, in layers; auto: 0",
        default=AUTO,
        check=not_negative,
        role=Role.MESH,
    )
    head_cost: float | Auto = setting(
        "cost of the output head when stages are balanced, in layers; auto: its weights / the weights of a block",
        default=AUTO,
        check=not_negative,
        role=Role.MESH,
    )


@frozen
class Cp:
    """`cp N { … }`: context parallel: the sequence is sharded over ring · ulysses ranks."""

    size: int = 1
    ring: int | Auto = setting(
        "ranks of ring attention; auto: size / ulysses",
        default=AUTO,
        check=rank_count,
        role=Role.MESH,
    )
    ulysses: int | Auto = setting(
        "ranks of Ulysses attention (all-to-all over heads); auto: as many as the heads allow",
        default=AUTO,
        check=rank_count,
        role=Role.MESH,
    )
    fold: Literal["all", "ulysses_only", "ring_only", "none"] = setting(
        "context axes that shard parameters together with fsdp", default="all", role=Role.MESH
    )


@frozen
class Parallel:
    """`parallel { … }`: the size of each axis of parallelism; by default fsdp is auto and all others are 1."""

    stack: str = component_name(STACKS, role=Role.MESH)
    tp: Tp = setting("tensor parallel", default=Tp(), role=Role.MESH)
    ep: Ep = setting("expert parallel", default=Ep(), role=Role.MESH)
    fsdp: Fsdp = setting("sharded data parallel", default=Fsdp(), role=Role.MESH)
    pp: Pp = setting("pipeline parallel", default=Pp(), role=Role.MESH)
    cp: Cp = setting("context parallel", default=Cp(), role=Role.MESH)

    @classmethod
    def complete(cls) -> "type[Parallel]":
        """Return the class with a block for each stack that has settings."""
        blocks = {name: stack.settings for name, stack in STACKS.items() if stack.settings is not None}
        return _parallel_class(tuple(blocks.items()))

    def of_stacks(self) -> dict[str, Any]:
        """Return the blocks of stacks, by stack name."""
        return {each.name: getattr(self, each.name) for each in fields(type(self)) if each.name in STACKS}

    @property
    def execution(self) -> Stack:
        """Chosen stack."""
        return STACKS[self.stack]()


@cache
def _parallel_class(blocks: tuple[tuple[str, type], ...]) -> type[Parallel]:
    declared = {
        name: setting(f"settings of `stack = {name}`", default=kind(), role=Role.MESH, added=True)
        for name, kind in blocks
    }
    about = {"__doc__": Parallel.__doc__, "__module__": __name__, "__annotations__": dict(blocks)}
    return frozen(type("Parallel", (Parallel,), {**about, **declared}))


@frozen
class Activation:
    """`activation MODE { … }`: activation checkpointing; without this block nothing is recomputed."""

    mode: Literal["full", "selective", "none"] = "none"
    every: int = setting(
        "recompute every n-th block",
        default=1,
        check=at_least(1),
        role=Role.EXECUTION,
    )
    save: tuple[Literal["matmul", "attention", "all_to_all", "reduce_scatter"], ...] | Auto = setting(
        "operations whose results selective recomputation keeps; auto: matmul, all_to_all and the reduce_scatter of "
        "tp if there is one, and attention unless it is flex outside of a compiled block",
        default=AUTO,
        role=Role.EXECUTION,
    )
    tile_mlp: int | Auto = setting(
        "chunks of a rank's positions in feed-forward layers without experts, each recomputed in the backward, so "
        "that hidden values of only one chunk exist; auto: chunks of at most as many positions as the model is wide",
        default=1,
        check=at_least(1),
        role=Role.EXECUTION,
        added=True,
    )


@frozen
class Compile:
    """`compile { … }`: torch.compile of each decoder block; without this block nothing is compiled."""

    mode: Literal["none", "default", "max_autotune"] = setting(
        "mode of torch.compile", default="default", role=Role.EXECUTION
    )
