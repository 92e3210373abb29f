"""The FSDP units of a rank: which parameters are gathered and exchanged together, and how large that is."""

from collections.abc import Iterable, Sequence
from math import prod

from attrs import frozen

from xtrain.planner.architecture import ParameterSpec
from xtrain.planner.costs.op_trace import FsdpUnit
from xtrain.planner.mesh.stages import stage_end_names
from xtrain.planner.model.inventory import block_tensors
from xtrain.planner.resolved import Resolved
from xtrain.planner.units import BYTES


@frozen
class BlockUnits:
    """Those of a block. dense: without its experts where these are a unit. None: FSDP has no part in it, or the block
    no experts."""

    dense: FsdpUnit | None
    experts: FsdpUnit | None

    @property
    def all(self) -> tuple[FsdpUnit, ...]:
        return tuple(unit for unit in (self.dense, self.experts) if unit is not None)


def units_of_block(run: Resolved, layer: int) -> BlockUnits:
    """The units that the nodes `expert_fsdp` and `fsdp` of a plan make of the block of one layer."""
    block = block_tensors(run.inventory, layer)
    dense = [t for t in block if not t.expert]
    experts = [t for t in block if t.expert]
    return BlockUnits(
        dense=_dense_unit(run, dense, reshards=run.reshard) if run.dense_fsdp else None,
        experts=_expert_unit(run, experts) if run.expert_fsdp and experts else None,
    )


def roots_of(run: Resolved) -> tuple[FsdpUnit | None, ...]:
    """Of each stage, what blocks leave of it: the units that the node `root_fsdp` makes."""
    ends = {t.name: t for t in run.inventory.tensors if not t.name.startswith("layers.")}
    roots = []
    for stage in range(len(run.pipeline.spans)):
        own = [ends[name] for name in stage_end_names(run.architecture, run.pipeline, stage)]
        roots.append(_dense_unit(run, own, reshards=False) if run.dense_fsdp and own else None)
    return tuple(roots)


def _dense_unit(run: Resolved, tensors: Sequence[ParameterSpec], *, reshards: bool) -> FsdpUnit:
    return _unit(run, tensors, 0, run.cuts.fsdp, run.group_mesh.size("replicate"), reshards=reshards)


def _expert_unit(run: Resolved, tensors: Sequence[ParameterSpec]) -> FsdpUnit:
    sizes = {axis.name: axis.size for axis in run.group_mesh.expert_axes}
    dimension = run.cuts.expert_dimension
    return _unit(run, tensors, dimension, run.cuts.ep_fsdp, sizes["ep_replicate"], reshards=run.reshard)


def _unit(
    run: Resolved, tensors: Sequence[ParameterSpec], dimension: int, shards: int, copies: int, *, reshards: bool
) -> FsdpUnit:
    def padded_elements(shapes: Iterable[tuple[int, ...]]) -> int:
        return sum(prod(shape) // shape[dimension] * -(-shape[dimension] // shards) * shards for shape in shapes)

    shapes = [run.cuts.gathered_shape(tensor) for tensor in tensors if tensor.trained]
    elements, padded = [prod(shape) for shape in shapes], padded_elements(shapes)
    compute, reduce = BYTES[run.formats.compute], BYTES[run.formats.reduce]
    whole = sum(
        padded_elements([run.cuts.stored_shape(tensor)]) * (1 if tensor.quantised else compute) for tensor in tensors
    )
    return FsdpUnit(
        whole=whole,
        gradients=sum(elements) * compute,
        summed=sum(elements) * reduce,
        buffer=padded * reduce,
        output=padded // shards * reduce,
        shard=padded // shards * BYTES[run.formats.params],
        largest=max(elements, default=0) * reduce,
        shards=shards,
        copies=copies,
        moved=dimension > 0 and shards > 1,
        reshards=reshards,
    )
