"""`Resolved`: a spec with nothing left to choose, which the parts of a plan are made from."""

from attrs import frozen

from ..dsl.schema.data import Dataset
from ..dsl.schema.model import Precision
from ..dsl.schema.parallel import Parallel
from ..dsl.schema.setting import Auto
from ..dsl.spec import Spec
from .architecture import Architecture
from .arithmetic import Arithmetic
from .layout import Layout
from .plan import Parameters
from .sharding import Cuts


@frozen(kw_only=True)
class Formats:
    """Number formats: parameters and optimizer state, forward and backward, sums of gradients."""

    params: str
    compute: str
    reduce: str


def resolve_formats(precision: Precision, parallel: Parallel) -> Formats:
    """`auto` is the format of the parameters."""
    params = precision.params
    return Formats(
        params=params,
        compute=params if precision.compute == "auto" else precision.compute,
        reduce=params if parallel.fsdp.reduce == "auto" else parallel.fsdp.reduce,
    )


@frozen(kw_only=True)
class Resolved:
    """What the graph, the timeline and the estimates are derived from."""

    spec: Spec
    architecture: Architecture
    layout: Layout
    batch: Arithmetic
    training: Dataset
    formats: Formats
    inventory: Parameters
    cuts: Cuts

    def size(self, axis: str) -> int:
        return self.layout.size(axis)

    def wide(self, *axes: str) -> tuple[str, ...]:
        """Those of `axes` that have more than one rank."""
        sizes = {axis.name: axis.size for axis in (*self.layout.mesh.axes, *self.layout.mesh.expert_axes)}
        return tuple(axis for axis in axes if sizes[axis] > 1)

    def product(self, axes: tuple[str, ...]) -> str:
        """`fsdp=64`, `fsdp=8 · ulysses=2`: axes with their sizes."""
        sizes = {axis.name: axis.size for axis in (*self.layout.mesh.axes, *self.layout.mesh.expert_axes)}
        return " · ".join(f"{axis}={sizes[axis]}" for axis in axes)


def attention_kernels(kernel: str | Auto) -> dict[str, str]:
    """The kernel on each kind of device: packed documents one by one on a CPU, one block mask on a GPU."""
    return {"cpu": "documents", "cuda": "flex"} if kernel == "auto" else {"cpu": str(kernel), "cuda": str(kernel)}
