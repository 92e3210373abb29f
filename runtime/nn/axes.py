"""Process groups that the modules of a rank compute in, and weights that are sharded over ranks.

Set-up ops fill in `Axes`; None means an axis of one rank, on which no collective runs.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Protocol

from attrs import define, evolve, frozen
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Partial

from xtrain.plan.mesh import piece
from xtrain.runtime.base.collectives import gather, scatter_sum, shared, total
from xtrain.runtime.base.ops import PlanMismatch
from xtrain.runtime.base.state import Rank

if TYPE_CHECKING:
    from xtrain.runtime.nn.head_product import TaskRouting


@frozen(eq=False)
class TensorAxis:
    """Tensor parallel: matrices are cut over `group`.

    sequence: between blocks a rank has its piece of the positions instead of all of them. loss: the loss is computed on
    a rank's piece of the vocabulary.
    """

    group: ProcessGroup
    sequence: bool
    loss: bool

    @property
    def size(self) -> int:
        return self.group.size()


@define(eq=False)
class Axes:
    """Process groups and shared state of all modules of a model.

    row: all ranks that hold positions of the same rows (ring · ulysses · tp). tasks: assignment of rows to adapters, if
    there are several. without_adapter: compute the model without its adapter. shared_meanwhile: compute shared experts
    while tokens are in transit to other ranks' experts. recorded: if it is a list, mixtures of experts append their
    routers' choices, int64 [B, S, K], in the order of a forward.
    """

    tensor: TensorAxis | None = None
    ring: ProcessGroup | None = None
    ulysses: ProcessGroup | None = None
    experts: ProcessGroup | None = None
    row: ProcessGroup | None = None
    tasks: "TaskRouting | None" = None
    without_adapter: bool = False
    shared_meanwhile: bool = False
    recorded: "list[Tensor] | None" = None

    @contextmanager
    def uncut_rows(self) -> Iterator[None]:
        """Let every rank compute all positions of a row within the block.

        This affects ranks of a ring and of ulysses, and tensor-parallel ranks between blocks. Matrices, heads and
        experts stay sharded.
        """
        before = self.tensor, self.ring, self.ulysses
        self.tensor = None if self.tensor is None else evolve(self.tensor, sequence=False)
        self.ring = self.ulysses = None
        try:
            yield
        finally:
            self.tensor, self.ring, self.ulysses = before


def own_part(tensor: Tensor) -> Tensor:
    """Return the tensor of this rank's part, not a view of it as `local` does."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def local(parameter: Tensor, *, partial: bool = False) -> Tensor:
    """Return this rank's shard of a parameter, as a plain tensor.

    partial: the rank uses a whole parameter on its own part of the work (positions, heads), so its gradient is one
    summand of the whole; otherwise all ranks do the same work with it.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=[Partial()] * parameter.device_mesh.ndim if partial else None)


def start_of(parameter: Tensor) -> tuple[int, ...]:
    """Return the offset of this rank's shard of a parameter along each dim."""
    start, extent = [0] * parameter.dim(), list(parameter.shape)
    if not isinstance(parameter, DTensor):
        return tuple(start)
    mesh, cuts = parameter.device_mesh, list(enumerate(parameter.placements))
    # A dim that is cut twice is strided: FSDP's axes, which come first in a mesh, cut what the others left.
    strided = any(hasattr(placement, "split_factor") for placement in parameter.placements)
    for axis, placement in reversed(cuts) if strided else cuts:
        if (dim := getattr(placement, "dim", None)) is not None:
            place, parts = mesh.get_local_rank(axis), mesh.size(axis)
            start[dim] += sum(piece(extent[dim], parts, earlier) for earlier in range(place))
            extent[dim] = piece(extent[dim], parts, place)
    return tuple(start)


def column_parallel_input(x_BSD: Tensor, tensor: TensorAxis | None) -> Tensor:
    """Return whole activations, before matrices that are cut by output, from activations between blocks."""
    if tensor is None:
        return x_BSD
    return gather(x_BSD, 1, tensor.group) if tensor.sequence else shared(x_BSD, tensor.group)


def row_parallel_output(x_BSD: Tensor, tensor: TensorAxis | None) -> Tensor:
    """Return activations between blocks from partial sums after a matrix that is cut by input."""
    if tensor is None:
        return x_BSD
    return scatter_sum(x_BSD, 1, tensor.group) if tensor.sequence else total(x_BSD, tensor.group)


class Named(Protocol):
    def named_modules(self) -> Iterable[tuple[str, nn.Module]]: ...


def matching(model: Named, pattern: str, matches: list[int], rank: Rank) -> list[tuple[str, nn.Module]]:
    """Return the modules whose dotted name fits `pattern`, where `*` stands for one name.

    Raises PlanMismatch unless there are as many as the plan has for this rank's pipeline coordinate.
    """
    depth = pattern.count(".")
    modules = [(n, m) for n, m in model.named_modules() if n.count(".") == depth and fnmatchcase(n, pattern)]
    expected = matches[rank.coordinates["pp"]]
    if len(modules) != expected:
        raise PlanMismatch(f"`{pattern}` fits {len(modules)} modules of the model, but the plan has {expected}")
    return modules
