"""`setup.parallel.ep` and `setup.parallel.expert_fsdp`: experts spread over ranks, then sharded over those that hold
the same ones."""

from torch import nn
from torch.distributed.tensor import DTensor, Shard

from xtrain.runtime.models.parts import ModelParts
from xtrain.runtime.ops import op
from xtrain.runtime.parallel.mesh import Meshes
from xtrain.runtime.parallel.rules import matching
from xtrain.runtime.parallelize.fsdp import make_unit
from xtrain.runtime.state import Rank


@op("setup.parallel.ep")
def spread_experts(
    model: ModelParts,
    meshes: Meshes,
    rank: Rank,
    size: int,
    pattern: str,
    matches: list[int],
    meanwhile: str | None = None,
) -> None:
    """Leave this rank its run of the experts of every layer; tokens of the others' experts are sent to them.

    meanwhile: what is computed while they are on their way, the `shared` experts.

    Works on a model without memory. Raises PlanMismatch unless as many modules fit `pattern` as the plan says.
    """
    mesh = meshes.experts["ep"]
    assert mesh.size() == size
    model.axes.experts = meshes.group("ep")
    assert meanwhile in (None, "shared")
    model.axes.shared_meanwhile = meanwhile is not None
    for _, experts in matching(model, pattern, matches, rank):
        for module in experts.modules():
            for name, parameter in module.named_parameters(recurse=False):
                own = parameter.detach().chunk(size)[mesh.get_local_rank()].clone()
                cut = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
                module.register_parameter(name, nn.Parameter(cut))


@op("setup.parallel.expert_fsdp")
def shard_experts(
    model: ModelParts,
    meshes: Meshes,
    rank: Rank,
    pattern: str,
    matches: list[int],
    dimension: int,
    compute: str,
    reduce: str,
    reshard: bool,
    offload: bool,
) -> None:
    """Make the experts of a layer a unit of their own, sharded along `dimension` of their stacks [E, K, N].

    A rank computes all tokens that come to it, so gradients of the ranks that hold the same experts add up to the
    whole: they are summed as those of dense parameters are, and divided by nothing.
    """
    for _, experts in matching(model, pattern, matches, rank):
        make_unit(
            experts,
            meshes.expert_fsdp,
            compute=compute,
            reduce=reduce,
            reshard=reshard,
            offload=offload,
            dimension=dimension,
        )
