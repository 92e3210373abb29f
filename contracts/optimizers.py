"""Contract of optimizers: arguments of their node, conflicts with a spec, and work other than elementwise updates."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from xtrain.blocks.op_trace import CollectiveCall
from xtrain.dsl.schema.optimizers import Optimizer
from xtrain.dsl.schema.setting import Conflict
from xtrain.lazy_attrs import frozen

if TYPE_CHECKING:
    from xtrain.dsl.spec import Spec
    from xtrain.plan.architecture import Architecture, ParameterSpec
    from xtrain.plan.mesh import Layout
    from xtrain.plan.resolved import Resolved


@frozen(kw_only=True)
class UpdateWork:
    """Work of one rank in a step. flops: of products of matrices. scratch: bytes allocated meanwhile."""

    calls: tuple[CollectiveCall, ...] = ()
    flops: int = 0
    scratch: int = 0

    def __add__(self, other: "UpdateWork") -> "UpdateWork":
        """Return the work of two optimizers, one after the other."""
        return UpdateWork(
            calls=(*self.calls, *other.calls),
            flops=self.flops + other.flops,
            scratch=max(self.scratch, other.scratch),
        )


class PlannedOptimizer(Optimizer):
    """Base class of all optimizers."""

    def arguments(self, resolved: "Resolved") -> dict[str, Any]:
        """Return the JSON arguments of the optimizer's node."""
        found = {"kind": self.kind, "lr": self.lr, **self.args()}
        if found.get("states") == resolved.formats.params:
            del found["states"]
        own = not resolved.stack.package and not resolved.spec.parallel.fsdp.offload
        on_cpus = "cpu" in (resolved.spec.launch.device, resolved.spec.cluster.device_kind())
        if own and not on_cpus and self.compiles(found):
            found["compiled"] = ["cuda"]
        return found

    def conflicts(self, spec: "Spec", architecture: "Architecture", layout: "Layout") -> Iterator[Conflict]:
        """Yield settings that do not fit the rest of a spec, its architecture or its layout."""
        if self.stochastic_rounding and (params := spec.precision.params) != "bf16":
            message = f"weights are in {params}, which resolves small updates; stochastic rounding is for bf16 only"
            yield Conflict("stochastic_rounding", message, "use precision.params bf16, or remove stochastic_rounding")

    def idle(self, spec: "Spec") -> Iterator[tuple[str, str]]:
        """Yield (setting, reason) for settings that have no effect."""
        if self.states == spec.precision.params:
            yield "states", f"parameters are in {self.states} already"

    def work(self, resolved: "Resolved", parameters: "Iterable[ParameterSpec]") -> "UpdateWork | None":
        """Return communication, products and scratch memory of an update on a rank; None if the update is elementwise
        on the rank's own shards. parameters: the trained parameters of a pipeline coordinate."""
        return None
