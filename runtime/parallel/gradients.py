"""The norm of the gradients of the whole model, every distinct element counted once."""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..state import Rank


class GradientNorm:
    """Measures the global norm with one all-reduce, which carries the loss of the step along.

    A rank adds the square of its shard divided by the number of ranks that hold the same shard, so that the sum over
    all ranks counts each element once, whatever is sharded or replicated over what.
    """

    def __init__(self, parameters: list[nn.Parameter], rank: Rank) -> None:
        self._parameters, self._rank = parameters, rank
        weights = [1.0 / copies(p, rank.world_size) for p in parameters]
        self._weights = torch.tensor(weights, dtype=torch.float64, device=rank.device)
        self._grads: list[Tensor] = []
        self._norm = torch.zeros(())
        self.value = float("nan")

    @torch.no_grad()
    def measure(self, loss_sum: Tensor) -> float:
        """Take the norm of the gradients as they are now; returns `loss_sum` summed over all ranks."""
        assert all(p.grad is not None for p in self._parameters), "every parameter is part of every step"
        self._grads = [_local(p.grad) for p in self._parameters if p.grad is not None]
        grads = [_at_least_fp32(g) for g in self._grads]
        norms = torch.stack(torch._foreach_norm(grads)).double()  # pyright: ignore[reportPrivateImportUsage]
        sums = torch.stack((norms.square() @ self._weights, loss_sum.double()))
        if self._rank.world_size > 1:
            dist.all_reduce(sums)
        squared, total = sums.tolist()
        self.value = math.sqrt(squared) if squared >= 0 else float("nan")
        return total

    @torch.no_grad()
    def scale(self, max_norm: float) -> None:
        """Shrink the measured gradients to `max_norm`; smaller ones stay as they are."""
        if self.value > max_norm:
            factor = max_norm / (self.value + 1e-6)
            torch._foreach_mul_(self._grads, factor)  # pyright: ignore[reportPrivateImportUsage]
        self._grads = []


def copies(parameter: Tensor, world_size: int) -> int:
    """How many ranks of the world hold the same elements as this one."""
    if not isinstance(parameter, DTensor):
        return world_size
    mesh, placements = parameter.device_mesh, parameter.placements
    shards = math.prod(mesh.size(i) for i, placement in enumerate(placements) if not placement.is_replicate())
    return world_size // shards


def _local(grad: Tensor) -> Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _at_least_fp32(grad: Tensor) -> Tensor:
    return grad if grad.dtype in (torch.float32, torch.float64) else grad.float()
