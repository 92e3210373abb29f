"""`parallel { stack = NAME }`: what is asked of execution stacks, which spread a model over ranks."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Final

from attrs import frozen

from .component import Component, Registry

STACKS: Final = Registry["Stack"]("stack", "stacks")
PREFIX: Final = "setup.parallel."


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
    `fsdp`), settings of fsdp (`reduce`, `reshard`, `sync`, `offload`), and `compute`, a format of its own for the
    computation."""
    uses_fsdp: ClassVar[bool] = False
    """Whether the model is cut into units of FSDP, from which memory and the nodes of a step follow."""
    buckets: ClassVar[bool] = False
    """Whether gradients are summed in buckets, which take as many bytes as the gradients."""
    beside: ClassVar[tuple[str, ...]] = ()
    """The nodes that make its calls while blocks are computed; all other calls are waited for."""
    resuming: ClassVar[Mapping[str, str]] = {}
    """Argument of its own node → what becomes of a run that is resumed with another value, as a clause."""

    def __init_subclass__(cls) -> None:
        """Raises TypeError for one that wraps the model and does not refuse pp: its wrapper would never be called."""
        if cls.wrap is not Stack.wrap and "pp" not in cls.unsupported:
            raise TypeError(
                f'{cls.__name__} wraps the model, and so its `unsupported` must have "pp": a pipeline schedule calls '
                "the stages and not the wrapper"
            )

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

    def calls(self, run: Any, stages: list[Any], pp: int) -> Iterable[tuple[Any, int]]:
        """(`CollectiveCall`, how often) of a step on the ranks of a pipeline coordinate: what the stack itself sends.

        stages: the `StageCosts` of each stage there.
        """
        return ()


def stack_of_node(op: str) -> type[Stack] | None:
    """The stack whose own node has this op; one that wraps nothing has none."""
    found = STACKS.get(op.removeprefix(PREFIX)) if op.startswith(PREFIX) else None
    return None if found is None or found.wrap is Stack.wrap else found
