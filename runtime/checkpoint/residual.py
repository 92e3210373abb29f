"""`setup.decompose` and `setup.residual`: an adapter that begins with a part of the matrices that it is of, which are
the rest from there on.

Checkpoints hold what it has begun with. So the model under it is read as it was at first, wherever the run goes on, and
the rest is the same to the last bit, also where another library would decompose a matrix otherwise.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from xtrain.planner.blocks.adapted import AdaptedMatrix, adapted_matrices
from xtrain.planner.model.targets import name_of
from xtrain.planner.plan import Plan
from xtrain.runtime.checkpoint.base_weights import BaseWeights
from xtrain.runtime.checkpoint.sources import starting_point
from xtrain.runtime.models.adapted import begun_part, decomposed
from xtrain.runtime.models.build import DTYPES
from xtrain.runtime.models.parts import ModelParts, QuantisedParameter
from xtrain.runtime.models.quantise import store, store_experts
from xtrain.runtime.models.tensors import fill, model_tensors, own_indices
from xtrain.runtime.monitoring.heartbeat import HeartbeatWriter
from xtrain.runtime.ops import PlanMismatch, op
from xtrain.runtime.parallel.collective_errors import CollectiveErrors
from xtrain.runtime.parallel.tensor import local
from xtrain.runtime.reporting.records import Records
from xtrain.runtime.state import Rank


@op("setup.decompose")
@torch.no_grad()
def decompose(
    plan: Plan, model: ModelParts, rank: Rank, records: Records, beat: HeartbeatWriter, matrices: int
) -> None:
    """Give an adapter its first values, made of the matrices as they were read or drawn. Each rank decomposes one
    matrix, or one stack of experts, of a turn; all get the values of all. A run that goes on reads its checkpoint
    instead.

    Raises PlanMismatch unless it decomposes so many `matrices`; StorageFailed on all ranks where one cannot read the
    model.
    """
    if starting_point(plan, records.directory).entry is not None:
        return
    own, todo = model_tensors(model, ""), _as_planned(plan, matrices)
    collective, exact = CollectiveErrors.of(rank), _exact(plan)
    format = DTYPES[plan.node("setup.freeze").args["format"]]
    with BaseWeights.of(plan, Path(), rank.device) as base:

        def values(at: int) -> dict[str, Tensor]:
            if at >= len(todo):
                return {}
            start, matrix = todo[at]
            spec = base.specs[name := f"{start}{matrix.name}"]
            if not spec.expert:
                made = decomposed(matrix, base.whole(name).to(rank.device, exact), format)
            else:
                read = base.experts(name)
                stacks = (read(number)[None].to(rank.device, exact) for number in range(spec.shape[0]))
                each = [decomposed(matrix, stack, format) for stack in stacks]
                made = {own: torch.cat([one[own] for one in each]) for own in each[0]}
            return {f"{start}{own}": value.cpu() for own, value in made.items()}

        for turn in range(0, len(todo), rank.world_size):
            for found in collective.all(lambda at=turn + rank.rank: values(at)):
                for name, whole in found.items():
                    if name in own:
                        fill(own[name], whole.to(rank.device))
            beat.mark()


@op("setup.residual")
def take_out(plan: Plan, model: ModelParts, rank: Rank, matrices: int) -> None:
    """Leave the rest of the matrices that the adapter has begun with a part of. Raises PlanMismatch unless these are so
    many `matrices`."""
    _as_planned(plan, matrices)
    leave_residual(plan, model, rank, Path())


@torch.no_grad()
def leave_residual(plan: Plan, model: ModelParts, rank: Rank, folder: Path) -> None:
    """The same of a model in whose memory the matrices are whole, and what the adapter has begun with. Collective.
    folder: where the run was started. Raises EnvironmentFault or OSError."""
    own, exact = model_tensors(model, ""), _exact(plan)
    quantised = {found.name: found for found in model.quantised()}
    with BaseWeights.of(plan, folder, rank.device) as base:
        for start, matrix in _decomposed(plan):
            if (name := f"{start}{matrix.name}") not in own:  # of another stage
                continue
            names = [each.name for each in plan.parameters.tensors if each.begun and each.adapter == name]
            beside = {each.removeprefix(start): whole_of(own[each], rank.device).to(exact) for each in names}
            if base.specs[name].expert:
                _leave_of_experts(matrix, base.experts(name), beside, own[name], quantised.get(name))
                continue
            part = begun_part(matrix, beside)
            if (found := quantised.get(name)) is not None:
                store(found, base.whole(name).to(rank.device, exact) - part)
                continue
            piece = torch.empty_like(own[name], dtype=exact)
            fill(piece, part)
            local(own[name]).copy_(local(own[name]).to(exact) - local(piece))


def _leave_of_experts(
    matrix: AdaptedMatrix,
    read: Callable[[int], Tensor],
    beside: Mapping[str, Tensor],
    parameter: Tensor,
    found: QuantisedParameter | None,
) -> None:
    """The same of a stack of experts, one of them at a time. read: gives the matrix of one."""

    def part_of(expert: int) -> Tensor:
        return begun_part(matrix, {name: each[expert : expert + 1] for name, each in beside.items()})[0]

    if found is not None:

        def rest(expert: int) -> Tensor:
            part = part_of(expert)
            return read(expert).to(part) - part

        store_experts(found, rest, every=True)
        return
    piece, experts = local(parameter), own_indices(parameter, 0).tolist()
    cut = torch.meshgrid(*(own_indices(parameter, dim).to(piece.device) for dim in (1, 2)), indexing="ij")
    for place, expert in enumerate(experts):
        part = part_of(expert)
        piece[place] = (piece[place].to(part.dtype) - part[cut]).to(piece.dtype)


def whole_of(parameter: Tensor, device: torch.device) -> Tensor:
    """All of a parameter, of which every rank has its piece. Collective over the ranks that share it."""
    if not isinstance(parameter, DTensor):
        return parameter.to(device)
    indices = [own_indices(parameter, dim).to(device) for dim in range(parameter.ndim)]
    whole = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
    whole[torch.meshgrid(*indices, indexing="ij")] = local(parameter).to(device)
    for axis, placement in enumerate(parameter.placements):
        if not placement.is_replicate():
            dist.all_reduce(whole, group=parameter.device_mesh.get_group(axis))  # zeros but in one place
    return whole


def _decomposed(plan: Plan) -> Iterator[tuple[str, AdaptedMatrix]]:
    """(what stands before names in the block, matrix) of all that an adapter begins with a part of."""
    for layer, matrix in adapted_matrices(plan.architecture):
        if matrix.decomposes:
            yield name_of(layer, ""), matrix


def _as_planned(plan: Plan, matrices: int) -> list[tuple[str, AdaptedMatrix]]:
    found = list(_decomposed(plan))
    if len(found) != matrices:
        raise PlanMismatch(f"an adapter begins with a part of {len(found)} matrices, and the node says {matrices}")
    return found


def _exact(plan: Plan) -> torch.dtype:
    return torch.float64 if plan.node("setup.build_model").args["params"] == "fp64" else torch.float32
