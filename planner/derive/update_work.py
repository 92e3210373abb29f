"""Work of optimizers in a step outside elementwise updates: conversions, products and gathering of whole matrices."""

from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from attrs import evolve

from xtrain.blocks.op_trace import CollectiveCall
from xtrain.contracts.optimizers import PlannedOptimizer, UpdateWork
from xtrain.dsl.schema.component import planned
from xtrain.dsl.schema.optimizers import OPTIMIZERS
from xtrain.plan.architecture import ParameterSpec
from xtrain.plan.groups import optimizers_of, rows_at_once
from xtrain.plan.mesh import MatrixBatch, MatrixCut, batches
from xtrain.text.units import BYTES

if TYPE_CHECKING:
    from xtrain.plan.resolved import Resolved


# Bytes of an element's 64 random bits and of their inputs.
OF_RANDOM_BITS: Final = 24
# Numbers per element while signs are compared: the update, both signs and their product.
OF_SIGNS: Final = 4


def update_work(resolved: "Resolved", parameters: Iterable[ParameterSpec]) -> UpdateWork | None:
    """Return the work of the first rank of a pipeline coordinate, over all optimizers. parameters: its own, whole."""
    found: UpdateWork | None = None
    owned: dict[str, list[ParameterSpec]] = {}
    for each in parameters:
        if each.trained:
            owned.setdefault(resolved.groups.owner(each.name), []).append(each)
    for name, chosen in optimizers_of(resolved.spec).items():
        own = owned.get(name, [])
        work = planned(chosen, PlannedOptimizer).work(resolved, own)
        args = resolved.groups.args(name)
        if chosen.converts(args) or args.get("cautious_decay", False):
            converted = _converted(resolved, args, own)
            work = evolve(work or UpdateWork(), scratch=(0 if work is None else work.scratch) + converted)
        if work is not None:
            found = work if found is None else found + work
    return found


_WORK: Final["WeakKeyDictionary[Resolved, tuple[UpdateWork | None, ...]]"] = WeakKeyDictionary()


def optimizer_work(resolved: "Resolved") -> tuple[UpdateWork | None, ...]:
    """Return the work of the optimizers on a rank of every pipeline coordinate; None for elementwise updates alone."""
    if resolved not in _WORK:
        _WORK[resolved] = tuple(update_work(resolved, own) for own in resolved.parameters_by_pp)
    return _WORK[resolved]


def cuts_along(resolved: "Resolved", parameter: ParameterSpec) -> list[tuple[str, int]]:
    """Return the axes that cut a parameter, and the dim of each."""
    cuts = resolved.cuts
    if parameter.expert:
        return [("ep_fsdp", cuts.expert_dimension)] if cuts.ep_fsdp > 1 else []
    found = [(" · ".join(resolved.wide(*resolved.shard_axes)), 0)] if cuts.fsdp > 1 else []
    if (dim := cuts.tensor_dim(parameter)) is not None:
        found.append(("tp", dim))
    return found


def _converted(resolved: "Resolved", args: Mapping[str, Any], parameters: Iterable[ParameterSpec]) -> int:
    """Return the bytes of some rows converted to the format of the update, which is fp32, or finer if the weights are,
    and of the mask of decaying elements. args: of the optimizer."""
    stored, rounds = resolved.formats.params, args.get("stochastic_rounding", False)
    cautious = OF_SIGNS if args.get("cautious_decay", False) else 0
    width = max(BYTES[stored], BYTES["fp32"])
    weights = 2 if width > BYTES[stored] else 0  # including the gradient
    largest, chosen = 0, OPTIMIZERS.of(args)
    for parameter in parameters:
        shape = resolved.cuts.shape(parameter)
        elements = min(shape[0], rows_at_once(shape)) * prod(shape[1:])
        moments = sum(BYTES[each.format or stored] != width for each in resolved.moments(parameter))
        if args.get("compiled"):  # one pass over each tensor, except codes, which need the largest of each block first
            codes = sum(each.format == "uint8" for each in resolved.moments(parameter))
            largest = max(largest, prod(shape) * (codes + (codes > 0)) * width)
            continue
        numbers = (weights + moments + chosen.temporaries) * width if chosen.converts(args) else 0
        largest = max(largest, elements * (numbers + cautious * width + rounds * OF_RANDOM_BITS))
    return largest


NODE = "step.optimizer"


def batches_of(resolved: "Resolved", parameters: Iterable[ParameterSpec]) -> list[MatrixBatch]:
    """Return the matrices of a pipeline coordinate as assigned to its ranks."""
    return batches((each.name, _local(resolved, each), _cuts(resolved, each)) for each in parameters)


def _local(resolved: "Resolved", parameter: ParameterSpec) -> tuple[int, int, int]:
    rows, columns = parameter.shape[-2:]
    return (resolved.cuts.shape(parameter)[0] if len(parameter.shape) == 3 else 1, rows, columns)


def _cuts(resolved: "Resolved", parameter: ParameterSpec) -> tuple[MatrixCut, ...]:
    cuts, found = resolved.cuts, []
    if parameter.expert:
        if cuts.ep_fsdp > 1 and cuts.expert_dimension:
            found.append(MatrixCut("ep_fsdp", cuts.ep_fsdp, cuts.expert_dimension))
        return tuple(found)
    if (dim := cuts.tensor_dim(parameter)) is not None:
        found.append(MatrixCut("tp", cuts.tp, 1 + dim))
    if cuts.fsdp > 1:
        found.append(MatrixCut(" · ".join(resolved.wide(*resolved.shard_axes)), cuts.fsdp, 1))
    return tuple(found)


def work_of(
    found: list[MatrixBatch],
    width: int,
    steps: int,
    symmetric: int | None,
    heads_of: Callable[[str], tuple[int, int]],
) -> UpdateWork:
    """Return the work of the first of the ranks that share the matrices. steps: of Newton–Schulz. width: bytes of a
    sent number. symmetric: rows from which 10 of 16 blocks of a symmetric product are computed; None: never. heads_of:
    number of heads of a parameter that are updated separately, and the dimension (of two) along which they lie."""
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
            # x·xᵀ and its square, which are symmetric, and their product with x, of min × max numbers each.
            rows, columns = min(sides), max(sides)
            mirrored = 2 * rows**2 * columns + 2 * rows**3
            if symmetric is not None and rows >= symmetric and rows % 4 == 0:
                mirrored = mirrored * 10 // 16
            flops += count * steps * (mirrored + 2 * rows**2 * columns)
        pieces = width * sum(prod(stack.at(len(batch.cuts) - 1, place)) for stack in batch.stacks)
        whole = width * sum(prod(stack.shape) for stack in own)
        largest = width * max((prod(stack.shape) for stack in own), default=0)
        # The pieces and their message, the pieces of the previous batch, the received pieces and the joined matrix, and
        # three matrices of the iteration.
        scratch = max(scratch, before + 2 * pieces + 2 * whole + 3 * largest)
        before = 2 * pieces if batch.cuts else 0
    return UpdateWork(calls=tuple(calls), flops=flops, scratch=scratch)
