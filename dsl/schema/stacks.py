"""`parallel { stack = NAME }`: what is asked of execution stacks, which spread a model over ranks."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Final

from attrs import frozen

from xtrain.dsl.schema.component import Component, Registry
from xtrain.dsl.schema.setting import Conflict

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
    `planner/graph/builder.py`.

    A stack that wraps the model puts a node `setup.parallel.NAME` behind the weights; the function with this op stands
    in the module `…_torch` beside it and gives `wrapped`, a `WrappedModel` (`runtime/parallelize/wrapped.py`). Its
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
        """What ranks do before they take the rows of a step: each a `StepNode`, see `planner/graph/action_node.py`."""
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
