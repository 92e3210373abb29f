"""The ranks that compute the same rows: those of tp and cp side by side, and the stages of a pipeline."""

import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from xtrain.runtime.parallel.mesh import Meshes
from xtrain.runtime.state import Rank


@frozen(eq=False)
class RowRanks:
    """row: the ranks of tp and cp; pipeline: the stages; None where that is this rank alone."""

    rank: Rank
    row: dist.ProcessGroup | None
    pipeline: dist.ProcessGroup | None

    @classmethod
    def of(cls, rank: Rank, meshes: Meshes) -> "RowRanks":
        return cls(rank, *(meshes.group(axis) if meshes.has(axis) else None for axis in ("row", "pp")))

    @property
    def is_first(self) -> bool:
        """Of those with the same rows this one does what one of them has to do."""
        return all(self.rank.coordinates[axis] == 0 for axis in ("pp", "ring", "ulysses", "tp"))

    def share(self, tensor: Tensor, stage: int = 0) -> Tensor:
        """Fill it on all of them with what it is on the first one of a pipeline coordinate. Collective."""
        if self.row is not None:
            dist.broadcast(tensor, group=self.row, group_src=0)
        if self.pipeline is not None:
            dist.broadcast(tensor, group=self.pipeline, group_src=stage)
        return tensor
