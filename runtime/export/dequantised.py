"""The tensors of a checkpoint, of matrices that are stored in codes the values of these."""

from collections.abc import Mapping

import torch
from attrs import frozen
from torch import Tensor

from xtrain.planner.mesh.placement import base_of_plan
from xtrain.planner.plan import Plan
from xtrain.runtime.checkpoint.whole_tensors import WholeTensors
from xtrain.runtime.models.quantised import QuantisedMatrix


@frozen
class Dequantised:
    """source: the checkpoint. matrices: name in it → how it is stored."""

    source: WholeTensors
    matrices: Mapping[str, QuantisedMatrix]

    @classmethod
    def of(cls, plan: Plan, source: WholeTensors, prefix: str) -> "Dequantised":
        """prefix: of the names of weights in the checkpoint."""
        base, found = base_of_plan(plan), {}
        for each in plan.parameters.tensors if base is not None else ():
            if each.quantised:
                assert base is not None
                first, scales = (0,) * len(each.shape), f"{prefix}{each.name}_scales" if base.double else ""
                found[f"{prefix}{each.name}"] = QuantisedMatrix(base, each.shape, each.shape, first, scales)
        return cls(source, found)

    def read(self, name: str) -> Tensor:
        """All of a tensor, in its own format, or in fp32 where it is stored in codes. Raises OSError."""
        stored = self.source.read(name)
        if (matrix := self.matrices.get(name)) is None:
            return stored
        beside = self.source.read(matrix.scales) if matrix.scales else None
        return matrix.values(stored, beside, torch.float32)
