"""Sums over a whole parameter of which each rank has a piece."""

from collections.abc import Collection, Iterable, Mapping

import torch
import torch.distributed as dist
from attrs import define, field
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor


@define(eq=False)
class SumsOverPieces:
    """device: where sums are sent from."""

    device: torch.device
    _groups: dict[str, ProcessGroup] = field(factory=dict, init=False)

    def cuts_of(self, parameter: Tensor) -> dict[str, int]:
        """The axes along which other ranks have the rest of a parameter: name → dim that is cut."""
        found: dict[str, int] = {}
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            for axis, (name, placement) in enumerate(zip(mesh.mesh_dim_names or (), parameter.placements, strict=True)):
                if mesh.size(axis) > 1 and not placement.is_replicate():
                    found[name] = placement.dim  # pyright: ignore[reportAttributeAccessIssue]
                    self._groups[name] = mesh.get_group(axis)
        return found

    def sum_up(self, wanted: Iterable[tuple[Tensor, Mapping[str, int], Collection[int]]]) -> None:
        """Sum tensors in place over the ranks that share a parameter, in one call along each axis. wanted: a tensor,
        the cuts of its parameter, and over which dims of that it is a sum."""
        wanted = list(wanted)
        for axis, group in self._groups.items():
            tensors = [tensor for tensor, cuts, dims in wanted if cuts.get(axis) in dims]
            if not tensors:
                continue
            sums = torch.cat([tensor.flatten() for tensor in tensors]).to(self.device)
            dist.all_reduce(sums, group=group)
            for tensor, total in zip(tensors, sums.split([tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(total.view(tensor.shape))
