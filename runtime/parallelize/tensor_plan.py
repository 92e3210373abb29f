"""`setup.parallel.tp`: matrices cut over the tensor axis by the rules of the plan; the rest is whole on each rank."""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from xtrain.planner.mesh.sharding import DIMENSION
from xtrain.runtime.models.layers import Linear, RMSNorm
from xtrain.runtime.models.moe import Experts
from xtrain.runtime.models.parts import ModelParts
from xtrain.runtime.ops import op
from xtrain.runtime.parallel.axes import TensorAxis
from xtrain.runtime.parallel.mesh import Meshes
from xtrain.runtime.parallel.rules import matching
from xtrain.runtime.state import Rank


@op("setup.parallel.tp")
def cut_matrices(
    model: ModelParts, meshes: Meshes, rank: Rank, size: int, sequence: bool, loss: bool, rules: list[dict[str, Any]]
) -> None:
    """Turn every dense parameter into a DTensor over tp. Experts are not: expert parallel spreads them over tp too.

    Raises PlanMismatch if a rule fits another number of modules than the plan says.
    """
    mesh = meshes.dense["tp"]
    assert mesh.size() == size
    model.axes.tensor = TensorAxis(group=meshes.group("tp"), sequence=sequence, loss=loss)
    model.axes.row = meshes.group("row")
    cut: set[nn.Module] = set()
    for rule in rules:
        for _, module in matching(model, rule["pattern"], rule["matches"], rank):
            _place(module, mesh, DIMENSION[rule["style"]])
            cut.add(module)
    experts = {each for module in model.modules() if isinstance(module, Experts) for each in module.modules()}
    for module in model.modules():
        if module in cut or module in experts:
            continue
        _place(module, mesh)
        if isinstance(module, RMSNorm):
            module.partial = sequence or module.by_head
        elif isinstance(module, Linear):  # those of experts are of a rank's own tokens in any case
            module.partial = sequence or module.partial


def _place(module: nn.Module, mesh: DeviceMesh, dimension: int | None = None) -> None:
    """Cut the parameters of a module along a dimension; those that do not have it are whole."""
    for name, parameter in module.named_parameters(recurse=False):
        whole = dimension is None or dimension >= parameter.ndim
        placement = Replicate() if whole else Shard(dimension)
        cut = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(cut))
