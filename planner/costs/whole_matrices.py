"""What it costs to bring matrices whole to one rank each and back (`planner/mesh/whole_matrices.py`)."""

from collections.abc import Callable, Iterable
from math import prod
from typing import TYPE_CHECKING

from xtrain.planner.architecture import ParameterSpec
from xtrain.planner.costs.op_trace import CollectiveCall
from xtrain.planner.mesh.whole_matrices import MatrixBatch, MatrixCut, batches
from xtrain.planner.update_work import UpdateWork

if TYPE_CHECKING:
    from xtrain.planner.resolved import Resolved

NODE = "step.optimizer"


def batches_of(run: "Resolved", parameters: Iterable[ParameterSpec]) -> list[MatrixBatch]:
    """The matrices of a pipeline coordinate as its ranks deal them out."""
    return batches((each.name, _local(run, each), _cuts(run, each)) for each in parameters)


def _local(run: "Resolved", parameter: ParameterSpec) -> tuple[int, int, int]:
    rows, columns = parameter.shape[-2:]
    return (run.cuts.shape(parameter)[0] if len(parameter.shape) == 3 else 1, rows, columns)


def _cuts(run: "Resolved", parameter: ParameterSpec) -> tuple[MatrixCut, ...]:
    cuts, found = run.cuts, []
    if parameter.expert:
        if cuts.ep_fsdp > 1 and cuts.expert_dimension:
            found.append(MatrixCut("ep_fsdp", cuts.ep_fsdp, cuts.expert_dimension))
        return tuple(found)
    if (dim := cuts.tensor_dim(parameter)) is not None:
        found.append(MatrixCut("tp", cuts.tp, 1 + dim))
    if cuts.fsdp > 1:
        found.append(MatrixCut(" · ".join(run.wide(*run.shard_axes)), cuts.fsdp, 1))
    return tuple(found)


def work_of(found: list[MatrixBatch], width: int, steps: int, heads_of: Callable[[str], tuple[int, int]]) -> UpdateWork:
    """Of the first rank of those that share the matrices. steps: of Newton and Schulz. width: bytes of a number on
    its way. heads_of: how many heads of a parameter are taken by themselves, and along which of its two dimensions
    they lie."""
    calls: list[CollectiveCall] = []
    flops, scratch, before = 0, 0, 0
    for batch in found:
        place = (0,) * len(batch.cuts)
        calls += [CollectiveCall(axis, "all_to_all", NODE, size * width) for axis, size in batch.sent(place)]
        own = [stack for stack in batch.stacks if not any(stack.owner)]
        for stack in own:
            count, *sides = stack.shape
            heads, dim = heads_of(stack.name)
            count, sides[dim] = count * heads, sides[dim] // heads
            # x·xᵀ, its square, and their product with x, of min × max numbers each.
            flops += count * steps * (4 * min(sides) ** 2 * max(sides) + 2 * min(sides) ** 3)
        pieces = width * sum(prod(stack.at(len(batch.cuts) - 1, place)) for stack in batch.stacks)
        whole = width * sum(prod(stack.shape) for stack in own)
        largest = width * max((prod(stack.shape) for stack in own), default=0)
        # The pieces and their message, those of the batch before them, what came and what was put together of it, and
        # three matrices of the iteration.
        scratch = max(scratch, before + 2 * pieces + 2 * whole + 3 * largest)
        before = 2 * pieces if batch.cuts else 0
    return UpdateWork(calls=tuple(calls), flops=flops, scratch=scratch)
