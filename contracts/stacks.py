"""Contract of execution stacks: their nodes in a plan, and what they add to memory and communication."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self

from xtrain.dsl.schema.component import planned
from xtrain.dsl.schema.parallel import Stack
from xtrain.dsl.schema.setting import Conflict
from xtrain.lazy_attrs import frozen

if TYPE_CHECKING:
    from xtrain.blocks.op_trace import CollectiveCall
    from xtrain.blocks.stage_costs import StageCosts
    from xtrain.dsl.spec import Spec
    from xtrain.plan.graph import Builder, StepNode
    from xtrain.plan.resolved import Resolved


@frozen
class OwnedBytes:
    """Bytes of a rank's state. parameters: of all parameters; trained: of trained parameters. elements: number of
    trained elements. moments: bytes of optimizer state. still: bytes of frozen parameters in checkpoints. reference:
    bytes of the stored reference. host: bytes in host memory instead."""

    parameters: int
    trained: int
    elements: int
    moments: int
    still: int
    reference: int
    host: int = 0

    def __add__(self, other: Self) -> Self:
        return type(self)(
            self.parameters + other.parameters,
            self.trained + other.trained,
            self.elements + other.elements,
            self.moments + other.moments,
            self.still + other.still,
            self.reference + other.reference,
            self.host + other.host,
        )


@frozen
class PlannedStack(Stack):
    """Base class of all execution stacks.

    All stacks cut the model in the same way along tp, cp, ep and pp, if they support these axes. The remaining ranks
    shard the model, or hold a copy each under a stack that does not support `fsdp`.

    A stack that wraps the model adds a node `setup.parallel.NAME` after the weights; the function with this op is in
    the module `…_torch` beside the stack and gives `wrapped`, a `WrappedModel` (`runtime/nn/pipeline.py`). Its
    `unsupported` must have `pp`: a pipeline schedule calls the stages themselves.
    """

    def __init_subclass__(cls) -> None:
        """Raises TypeError for a stack that wraps the model but does not refuse pp: its wrapper would not be called."""
        if cls.wraps() and "pp" not in cls.unsupported:
            raise TypeError(
                f'{cls.__name__} wraps the model, and so its `unsupported` must have "pp": a pipeline schedule calls '
                "the stages and not the wrapper"
            )

    @classmethod
    def wraps(cls) -> bool:
        return cls.wrap is not PlannedStack.wrap or cls.wrap_optimizer is not PlannedStack.wrap_optimizer

    def shard(self, graph: "Builder", resolved: "Resolved", last: str) -> str:
        """Add the nodes that cut the model, which has no weights yet, after `last`. Return the id of the last node."""
        return last

    def wrap(self, graph: "Builder", resolved: "Resolved", last: str) -> str:
        """Add the node that wraps the model with its weights, after `last`. Return the id of the last node."""
        return last

    def wrap_optimizer(self, graph: "Builder", resolved: "Resolved", last: str) -> str:
        """Add the nodes that wrap the model together with its optimizer, after the optimizer's node `last`. Return the
        id of the last node."""
        return last

    def replicas(self, spec: "Spec") -> int | None:
        """Return the number of copies of the model, if the stack decides it; None: `fsdp { replicate }` does."""
        return None

    def before_rows(self, resolved: "Resolved") -> Iterable["StepNode"]:
        """Return the nodes of a step before its rows are fetched."""
        return ()

    def sums(self, resolved: "Resolved") -> Iterable["StepNode"]:
        """Return the nodes of a step after the gradient sums of all axes."""
        return ()

    def conflicts(self, spec: "Spec") -> Iterable[Conflict]:
        """Return unsupported features of a spec, in addition to `unsupported`; `setting` is a path of the spec."""
        return ()

    def idle(self, spec: "Spec") -> Iterable[tuple[str, str]]:
        """Return (setting of the stack's block, reason) for settings that have no effect."""
        return ()

    def savings(self, spec: "Spec") -> Iterable[Mapping[str, Any]]:
        """Return values for settings of the stack's block that reduce device memory without changing the training."""
        return ()

    def held(self, resolved: "Resolved", states: OwnedBytes) -> OwnedBytes:
        """Return the bytes of parameters, gradients and optimizer state on a rank. states: the same for the shards that
        the mesh axes give the rank."""
        return states

    def gradients_spared(self, resolved: "Resolved", states: OwnedBytes) -> int:
        """Return the bytes of `states.trained`, the rank's gradients, that never exist at the same time. states: as
        `held` takes them."""
        return 0

    def gathered(self, resolved: "Resolved") -> int:
        """Return the peak bytes of parameters that the stack gathers to compute with them, without FSDP's."""
        return 0

    def beside_update(self, resolved: "Resolved", states: OwnedBytes) -> int:
        """Return the bytes of an update in addition to gradients and moments. states: as `held` returns them."""
        return 0

    def calls(
        self, resolved: "Resolved", stages: list["StageCosts"], pp: int
    ) -> Iterable[tuple["CollectiveCall", int]]:
        """Return (collective call, count per step) of the stack itself on a rank of a pipeline coordinate. stages: the
        stages of that coordinate."""
        return ()


def stack_of(spec: "Spec") -> PlannedStack:
    """Return the execution stack of a spec."""
    return planned(spec.parallel.execution, PlannedStack)
