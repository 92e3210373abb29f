"""Tensor parallel: how weights cut over ranks are read, and where activations cross from one layout to the other.

Between blocks activations are whole, or with `sequence` cut along S; a column-wise matrix wants them whole, the
row-wise one after it leaves partial sums. Shapes: B rows, S positions, D dim.
"""

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from .axes import TensorAxis
from .collectives import gather, scatter_sum, shared, total


def local(parameter: Tensor, *, partial: bool = False) -> Tensor:
    """This rank's piece of a parameter, as a plain tensor.

    partial: the rank uses a whole parameter on its own part of the work (positions, heads), so its gradient is one
    summand of the whole; otherwise all ranks do the same work with it.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=[Partial()] * parameter.device_mesh.ndim if partial else None)


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
