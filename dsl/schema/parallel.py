"""Distribution over ranks: `parallel` with its axes and execution stacks, `activation`, `compile`."""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, ClassVar, Final, Literal

from attrs import fields, frozen

from xtrain.dsl.schema.component import Component, Registry
from xtrain.dsl.schema.setting import (
    AUTO,
    Auto,
    Conflict,
    Role,
    at_least,
    component_name,
    not_negative,
    rank_count,
    setting,
)

STACKS: Final = Registry["Stack"]("stack", "stacks")
PREFIX: Final = "setup.parallel."


@frozen
class StackSettings:
    """`NAME { … }` inside `parallel`: the settings of a stack of that name."""


@STACKS.base
@frozen
class Stack(Component):
    """`stack = NAME`: how the model is spread over ranks, and how its gradients are summed.

    How a rank computes on tp, cp, ep and pp is the same under all stacks that support these axes, and so is what these
    axes cut. The ranks that a spec leaves over shard the model, or have a copy of it each where the stack does not
    support `fsdp`. `run`, in what follows, is a `Resolved`, see `planner/resolved.py`, and `graph` a `Builder`, see
    `plan/graph.py`.

    A stack that wraps the model puts a node `setup.parallel.NAME` behind the weights; the function with this op stands
    in the module `…_torch` beside it and gives `wrapped`, a `WrappedModel` (`runtime/nn/pipeline.py`). Its
    `unsupported` must have `pp`: a pipeline schedule calls the stages themselves.
    """

    unsupported: ClassVar[Mapping[str, str]] = {}
    """What it does not support → what it does instead, as a clause behind its name: axes (`tp`, `pp`, `cp`, `ep`,
    `fsdp`), settings of fsdp (`reduce`, `reshard`, `sync`, `prefetch`, `offload`), and `compute`, a format of its own
    for the computation."""
    uses_fsdp: ClassVar[bool] = False
    """Whether the model is cut into units of FSDP, from which memory and the nodes of a step follow."""
    buckets: ClassVar[bool] = False
    """Whether gradients are summed in buckets, which take as many bytes as the gradients."""
    beside: ClassVar[tuple[str, ...]] = ()
    """The nodes that make its calls while blocks are computed; all other calls are waited for."""
    groups: ClassVar[bool] = False
    """Whether the copies of the model (`replicate`) are replica groups: each has a process group of its own, and may
    end and be started again while the others train. Its own node has `replicas`, how many there are."""
    settings: ClassVar[type[StackSettings] | None] = None
    """The class of its block in `parallel`, which is called after it."""
    package: ClassVar[str] = ""
    """The package that it cannot run without."""
    install: ClassVar[str] = ""
    """What `pip install` takes for that package."""
    looks_at_machine: ClassVar[bool] = False
    """Whether it may need more of a machine than that package. `check_machine` of its `…_run` module is then given
    `launch.device` and, by name, the arguments of its own node; it builds nothing, and raises EnvironmentFault."""
    resuming: ClassVar[Mapping[str, str]] = {}
    """Argument of its own node → what becomes of a run that is resumed with another value, as a clause; empty where
    other arguments, or the batch, say the same."""

    def __init_subclass__(cls) -> None:
        """Raises TypeError for one that wraps the model and does not refuse pp: its wrapper would never be called."""
        if cls.wraps() and "pp" not in cls.unsupported:
            raise TypeError(
                f'{cls.__name__} wraps the model, and so its `unsupported` must have "pp": a pipeline schedule calls '
                "the stages and not the wrapper"
            )

    @classmethod
    def wraps(cls) -> bool:
        """Whether it has a node that wraps the model."""
        return cls.wrap is not Stack.wrap or cls.wrap_optimizer is not Stack.wrap_optimizer

    @classmethod
    def node(cls) -> str:
        """The id and the op of its own node."""
        return f"{PREFIX}{cls.kind}"

    def shard(self, graph: Any, run: Any, last: str) -> str:
        """Add the nodes that cut the model, which has no weights yet, behind `last`; the id of the last node."""
        return last

    def wrap(self, graph: Any, run: Any, last: str) -> str:
        """Add the node that wraps the model, which has its weights, behind `last`; the id of the last node."""
        return last

    def wrap_optimizer(self, graph: Any, run: Any, last: str) -> str:
        """Add the nodes that wrap the model together with its optimizer, behind `last`, which gives the optimizer; the
        id of the last node."""
        return last

    def replicas(self, spec: Any) -> int | None:
        """How many copies of the model there are, where it says so itself; None: `fsdp { replicate }` does."""
        return None

    def before_rows(self, run: Any) -> Iterable[Any]:
        """What ranks do before they take the rows of a step: each a `StepNode`, see `plan/graph.py`."""
        return ()

    def sums(self, run: Any) -> Iterable[Any]:
        """What is done about gradients behind the sums of all axes: each a `StepNode`."""
        return ()

    def conflicts(self, spec: Any) -> Iterable[Conflict]:
        """What of a spec it does not support beside `unsupported`; each `setting` is a path of the spec."""
        return ()

    def idle(self, spec: Any) -> Iterable[tuple[str, str]]:
        """Settings of its block that another one makes idle, and why."""
        return ()

    def savings(self, spec: Any) -> Iterable[dict[str, Any]]:
        """Values of settings of its block with which a rank's device would hold less, and nothing else is learned."""
        return ()

    def held(self, run: Any, states: Any) -> Any:
        """What a rank has of parameters, their gradients and the state of the optimizer, an `OwnedBytes`. states: of
        the pieces that the axes of the mesh leave it."""
        return states

    def gradients_spared(self, run: Any, states: Any) -> int:
        """Bytes of `states.trained`, the gradients of the pieces that a rank computes with, that are never there at
        once. states: as `held` gets them."""
        return 0

    def gathered(self, run: Any) -> int:
        """Bytes of parameters that a rank puts together to compute with them, at most at once; FSDP has its own."""
        return 0

    def beside_update(self, run: Any, states: Any) -> int:
        """Bytes that an update takes beside gradients and moments. states: as `held` gives them."""
        return 0

    def calls(self, run: Any, stages: list[Any], pp: int) -> Iterable[tuple[Any, int]]:
        """(`CollectiveCall`, how often) of a step on the ranks of a pipeline coordinate: what the stack itself sends.

        stages: the `StageCosts` of each stage there.
        """
        return ()


def stack_of_node(op: str) -> type[Stack] | None:
    """The stack whose own node has this op; one that wraps nothing has none."""
    found = STACKS.get(op.removeprefix(PREFIX)) if op.startswith(PREFIX) else None
    return None if found is None or not found.wraps() else found


def stack_of_step(op: str) -> type[Stack] | None:
    """The stack that has this op in its steps: `step.NAME.…`."""
    kind, *names = op.split(".")
    return STACKS.get(names[0]) if kind == "step" and len(names) > 1 else None


@frozen
class Tp:
    """`tp N { … }`: tensor parallel."""

    size: int = 1
    sequence: bool = setting("keep activations between blocks sharded by sequence", default=True, role=Role.MESH)
    loss: bool = setting("compute the loss on logits sharded by vocabulary", default=True, role=Role.MESH)
    overlap: bool = setting(
        "multiply piece by piece while the pieces travel between ranks; in compiled blocks on cuda",
        default=False,
        role=Role.EXECUTION,
        added=True,
    )


@frozen
class Ep:
    """`ep N`: expert parallel; adds no ranks, but reuses those of fsdp · ring · ulysses · tp."""

    size: int = 1


@frozen
class Fsdp:
    """`fsdp N { … }` or `fsdp auto`: parameters, gradients and optimizer state sharded over data ranks."""

    size: int | Auto = AUTO
    replicate: int = setting(
        "number of replicas of the sharded model (HSDP)", default=1, check=rank_count, role=Role.MESH
    )
    reduce: Literal["auto", "fp32", "fp64", "bf16"] = setting(
        "format in which fsdp sums gradients; auto: that of the parameters", default="auto", role=Role.EXECUTION
    )
    reshard: bool | Auto = setting(
        "free the gathered parameters of a block between forward and backward; auto: only without a pipeline",
        default=AUTO,
        role=Role.MESH,
    )
    sync: Literal["auto", "step", "microbatch"] = setting(
        "when gradients are reduced: once a step, unsharded until then, or after every microbatch; "
        "auto: microbatch where a step has several, none is in a pipeline, and whole gradients exceed 1 GiB",
        default="auto",
        role=Role.MESH,
    )
    prefetch: bool | Auto = setting(
        "gather the parameters of the next unit while one computes its forward, asked for before it begins; auto: "
        "where the host waits in a forward, as for the rows that each expert gets",
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
        "layers of each stage, in the order of the pipeline; auto: as even as the costs below allow",
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
        "cost of the output head when stages are balanced, in layers; auto: its weights / those of a block",
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
        """The class with a block for each stack that has settings."""
        blocks = {name: stack.settings for name, stack in STACKS.items() if stack.settings is not None}
        return _parallel_class(tuple(blocks.items()))

    def of_stacks(self) -> dict[str, Any]:
        """The blocks of stacks, by the names of these."""
        return {each.name: getattr(self, each.name) for each in fields(type(self)) if each.name in STACKS}

    @property
    def execution(self) -> Stack:
        """The stack of that name."""
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
    save: tuple[Literal["matmul", "attention", "all_to_all"], ...] | Auto = setting(
        "operations whose results selective recomputation keeps; auto: matmul, all_to_all if there is one, and "
        "attention unless it is flex outside of a compiled block",
        default=AUTO,
        role=Role.EXECUTION,
    )
    tile_mlp: int | Auto = setting(
        "pieces of a rank's positions in which feed-forward layers without experts are computed, each again in the "
        "backward, so that their hidden values exist of one piece only; auto: pieces of at most as many positions as "
        "the model is wide",
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
