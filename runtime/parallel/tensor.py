"""Tensor parallel: how weights cut over ranks are read, and where activations cross from one layout to the other.

Between blocks activations are whole, or with `sequence` cut along S; a column-wise matrix wants them whole, the
row-wise one after it leaves partial sums. Shapes: B rows, S positions, D dim.
"""

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from xtrain.planner.mesh.sharding import piece
from xtrain.runtime.parallel.axes import TensorAxis
from xtrain.runtime.parallel.collectives import gather, scatter_sum, shared, total


def local(parameter: Tensor, *, partial: bool = False) -> Tensor:
    """This rank's piece of a parameter, as a plain tensor.

    partial: the rank uses a whole parameter on its own part of the work (positions, heads), so its gradient is one
    summand of the whole; otherwise all ranks do the same work with it.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=[Partial()] * parameter.device_mesh.ndim if partial else None)


def start_of(parameter: Tensor) -> tuple[int, ...]:
    """Where this rank's piece of a parameter begins, along each dim."""
    start, extent = [0] * parameter.dim(), list(parameter.shape)
    if not isinstance(parameter, DTensor):
        return tuple(start)
    mesh, cuts = parameter.device_mesh, list(enumerate(parameter.placements))
    # What is cut twice is strided: the axes of FSDP, which stand first in a mesh, cut what the others have left.
    strided = any(hasattr(placement, "split_factor") for placement in parameter.placements)
    for axis, placement in reversed(cuts) if strided else cuts:
        if (dim := getattr(placement, "dim", None)) is not None:
            place, parts = mesh.get_local_rank(axis), mesh.size(axis)
            start[dim] += sum(piece(extent[dim], parts, each) for each in range(place))
            extent[dim] = piece(extent[dim], parts, place)
    return tuple(start)


def column_parallel_input(x_BSD: Tensor, tensor: TensorAxis | None) -> Tensor:
    """Activations between blocks → whole ones, before matrices that are cut by output."""
    if tensor is None:
        return x_BSD
    return gather(x_BSD, 1, tensor.group) if tensor.sequence else shared(x_BSD, tensor.group)


def row_parallel_output(x_BSD: Tensor, tensor: TensorAxis | None) -> Tensor:
    """Partial sums after a matrix that is cut by input → activations between blocks."""
    if tensor is None:
        return x_BSD
    return scatter_sum(x_BSD, 1, tensor.group) if tensor.sequence else total(x_BSD, tensor.group)
