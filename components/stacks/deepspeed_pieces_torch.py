"""DeepSpeed's per-rank spans of parameters, and their conversion to checkpoints.

A rank's piece of a parameter group is a span of the concatenated parameters, padded to a size divisible by the number
of ranks; it may begin and end anywhere. Checkpoints hold no such spans: moments are assembled and saved as FSDP shards,
so that any layout reads them.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from xtrain.plan.groups import ParameterGroups
from xtrain.plan.plan import Plan
from xtrain.runtime.base.state import Rank
from xtrain.runtime.nn.optimizer import LocalOptimizer


class EngineOptimizer(Optimizer):
    """An optimizer called through the engine, with the gradients and state of the parameters."""

    def __init__(self, engine: Any, inner: Optimizer) -> None:
        super().__init__([{"params": [nn.Parameter(torch.empty(0))]}], {})
        self.engine, self.inner = engine, inner
        self.param_groups, self.state = inner.param_groups, inner.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters through the engine. closure: not used."""
        self.engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of a skipped step."""
        self.engine.module.zero_grad(set_to_none=True)


class PiecesOptimizer(EngineOptimizer):
    """Optimizer under ZeRO 1 and 2: each rank updates a piece of every group. offloads: the pieces are in host memory,
    where the engine puts the gradients before they are measured."""

    def __init__(
        self, engine: Any, inner: LocalOptimizer, names: dict[nn.Parameter, str], rank: Rank, *, offloads: bool
    ) -> None:
        super().__init__(engine, inner)
        self.zero, self.inner, self.names, self.rank, self.offloads = engine.optimizer, inner, names, rank, offloads
        self.mesh = init_device_mesh(rank.device.type, (rank.world_size,))

    @property
    def updated(self) -> list[Tensor]:
        """This rank's part of each parameter group."""
        return self.zero.single_partition_of_fp32_groups

    def gradients(self) -> list[Tensor]:
        """Return this rank's pieces of the gradients, summed over ranks; the update reads changes written to them."""
        if self.offloads:
            return [group.grad for group in self.updated if group.grad is not None]
        found = self.zero.averaged_gradients
        return [each for group in sorted(found) for each in found[group] or ()]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.zero.zero_grad(set_to_none=True)
        for group in self.zero.averaged_gradients:
            self.zero.averaged_gradients[group] = None
            self.zero.all_grad_tensors[group] = None
        self.zero.micro_step_id = -1  # the state before the first microbatch of a step

    def tensors(self, plan: Plan) -> dict[str, Tensor]:
        groups, found = ParameterGroups.of(plan), dict[str, Tensor]()
        for piece in self._pieces():
            state = self.inner.state[piece.updated]
            for count in groups.scalars(piece.name):
                value = state[count].clone() if count in state else torch.zeros((), device=self.rank.device)
                found[f"optimizer.{piece.name}.{count}"] = value
            for moment in groups.state(piece.name):
                self._begin(piece, moment.name)
                found[f"optimizer.{piece.name}.{moment.name}"] = self._shard(piece, state[moment.name])
        return found

    def weights(self) -> dict[str, Tensor]:
        """Return no weights: every rank has all parameters in the model."""
        return {}

    @torch.no_grad()
    def take(self, plan: Plan, tensors: dict[str, Tensor]) -> None:
        groups = ParameterGroups.of(plan)
        for piece in self._pieces(writes=True):
            state = self.inner.state[piece.updated]
            for count in groups.scalars(piece.name):
                state[count] = tensors[f"optimizer.{piece.name}.{count}"].to(piece.updated.device, copy=True)
            for moment in groups.state(piece.name):
                self._begin(piece, moment.name)
                self._put(piece, state[moment.name], tensors[f"optimizer.{piece.name}.{moment.name}"])

    def take_weights(self, tensors: dict[str, Tensor]) -> None:
        self.zero.refresh_fp32_params()  # of the parameters, which were loaded

    @torch.no_grad()
    def begin_from(self, exact: dict[str, Tensor]) -> None:
        """Set the pieces to exact weights, of which the engine keeps only bf16."""
        for piece in self._pieces(writes=True) if exact else ():
            piece.updated[piece.of_group] = exact[piece.name].flatten()[piece.of_parameter]

    def _begin(self, piece: "OwnedSpan", moment: str) -> None:
        if moment not in self.inner.state[piece.updated]:
            self.inner.begin(piece.updated, moment)

    def at_hand(self, group: int, *, writes: bool) -> AbstractContextManager[None]:
        """Load a group's weights and moments into memory meanwhile. writes: they are changed."""
        return nullcontext()

    def _pieces(self, *, writes: bool = False) -> Iterator["OwnedSpan"]:
        """Yield this rank's spans of the parameters, some of them empty; in the same order on all ranks."""
        for group in range(len(self.updated)):
            with self.at_hand(group, writes=writes):
                yield from self._pieces_of(group)

    def _pieces_of(self, group: int) -> Iterator["OwnedSpan"]:
        length = int(self.zero.partition_size[group])
        first, parameters = self.rank.rank * length, self.zero.round_robin_bit16_groups[group]
        for parameter, offset in zip(parameters, self.zero.round_robin_bit16_offsets[group], strict=True):
            begin = min(max(offset, first), first + length)
            end = max(begin, min(offset + parameter.numel(), first + length))
            yield OwnedSpan(
                name=self.names[parameter],
                shape=parameter.shape,
                updated=self.updated[group],
                of_group=slice(begin - first, end - first),
                of_parameter=slice(max(begin - offset, 0), max(end - offset, 0)),
            )

    def _put(self, piece: "OwnedSpan", group: Tensor, shard: Tensor) -> None:
        """Copy this rank's piece of a tensor, sharded over the ranks, into its part of the group. Collective."""
        assert isinstance(shard, DTensor)
        group[piece.of_group] = shard.full_tensor().flatten()[piece.of_parameter].to(group.device)

    def _shard(self, piece: "OwnedSpan", group: Tensor) -> DTensor:
        """Return this rank's FSDP shard of a tensor whose pieces are spread over the ranks' parts of the group.
        Collective, on the device; each rank temporarily holds the whole tensor."""
        flat = torch.zeros(piece.size, dtype=group.dtype, device=self.rank.device)
        flat[piece.of_parameter] = group.detach()[piece.of_group].to(flat.device)
        dist.all_reduce(flat)
        whole = flat.view(piece.shape)
        chunks = whole.chunk(self.rank.world_size)
        own = chunks[self.rank.rank] if self.rank.rank < len(chunks) else whole[:0]
        stride = whole.stride()
        return DTensor.from_local(own.clone(), self.mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=stride)


class ExactPieces(PiecesOptimizer):
    """Fp32 pieces of a model that computes in bf16; the fp32 pieces are saved."""

    def weights(self) -> dict[str, Tensor]:
        return {f"model.{piece.name}": self._shard(piece, piece.updated) for piece in self._pieces()}

    @torch.no_grad()
    def take_weights(self, tensors: dict[str, Tensor]) -> None:
        parameters = {name: parameter for parameter, name in self.names.items()}
        for piece in self._pieces():
            shard = tensors[f"model.{piece.name}"]
            self._put(piece, piece.updated, shard)
            assert isinstance(shard, DTensor)
            parameters[piece.name].copy_(shard.full_tensor())


class WeightsInPieces(ExactPieces):
    """Optimizer under ZeRO 3, where parameters exist only while their module computes."""

    @property
    def updated(self) -> list[Tensor]:
        return self.zero.fp32_partitioned_groups_flat

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.zero.zero_grad(set_to_none=True)
        self.zero.averaged_gradients = {}

    @torch.no_grad()
    def take_weights(self, tensors: dict[str, Tensor]) -> None:
        for group in range(len(self.updated)):
            with self.at_hand(group, writes=True):
                for piece in self._pieces_of(group):
                    self._put(piece, piece.updated, tensors[f"model.{piece.name}"])
                self.zero._reassign_or_swap_out_partitioned_parameters(group)  # parameters for the computation

    def _pieces_of(self, group: int) -> Iterator["OwnedSpan"]:
        begin = 0
        for parameter in self.zero.fp16_groups[group]:
            length, size = parameter.partition_numel(), parameter.ds_numel
            first = min(self.rank.rank * length, size)
            own = min(length, size - first)
            yield OwnedSpan(
                name=self.names[parameter],
                shape=parameter.ds_shape,
                updated=self.updated[group],
                of_group=slice(begin, begin + own),
                of_parameter=slice(first, first + own),
            )
            begin += length


@frozen(kw_only=True, eq=False)
class OwnedSpan:
    """The span of a parameter that a rank updates. updated: this rank's part of the parameter group, in which the span
    is `of_group`."""

    name: str
    shape: torch.Size
    updated: Tensor
    of_group: slice
    of_parameter: slice

    @property
    def size(self) -> int:
        """Elements of the whole parameter."""
        return prod(self.shape)
