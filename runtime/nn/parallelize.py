"""Set-up nodes that distribute the model over ranks: tp, cp, ep and FSDP2, with gradients summed, never averaged."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from attrs import frozen
from torch import Tensor, nn
from torch._inductor import config
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from xtrain.plan.mesh import DIMENSION
from xtrain.runtime.base.collectives import to_heads, to_positions
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.mesh import EXPERT_SHARD, SHARD, Meshes
from xtrain.runtime.base.ops import PlanMismatch, op
from xtrain.runtime.base.state import Rank
from xtrain.runtime.nn.attention import AttentionKernel, AttentionModule
from xtrain.runtime.nn.attention_blocks import PLAIN, Scores
from xtrain.runtime.nn.axes import Axes, TensorAxis, matching
from xtrain.runtime.nn.batch import DocumentLayout
from xtrain.runtime.nn.blockwise import blockwise_attention
from xtrain.runtime.nn.build import DTYPES
from xtrain.runtime.nn.layers import Linear, RMSNorm
from xtrain.runtime.nn.moe import Experts
from xtrain.runtime.nn.transformer import ModelParts, Transformer


@op("setup.parallel.tp")
def cut_matrices(
    model: ModelParts, meshes: Meshes, rank: Rank, size: int, sequence: bool, loss: bool, rules: list[dict[str, Any]]
) -> None:
    """Turn every dense parameter into a DTensor over tp, except experts, which expert parallelism distributes over tp
    too.

    Raises PlanMismatch if a rule fits another number of modules than in the plan.
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
            module.partial = sequence or module.by_head or module.partial
        elif isinstance(module, Linear):  # next to experts a rank always has its own tokens
            module.partial = sequence or module.partial


def _place(module: nn.Module, mesh: DeviceMesh, dimension: int | None = None) -> None:
    """Cut the parameters of a module along a dimension; parameters without it stay whole."""
    for name, parameter in module.named_parameters(recurse=False):
        whole = dimension is None or dimension >= parameter.ndim
        placement = Replicate() if whole else Shard(dimension)
        cut = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(cut))


@frozen(eq=False)
class ContextKernel:
    """Attention of this rank's positions over their whole rows, which `packing` describes.

    Ulysses gathers the positions of a ring rank for some of the heads. If that is not yet the whole row, ring attention
    follows, else the kernel of one rank.
    """

    inner: AttentionKernel
    axes: Axes

    def __call__(
        self,
        q_BHSA: Tensor,
        k_BKSA: Tensor,
        v_BKSA: Tensor,
        packing: DocumentLayout,
        scores: Scores = PLAIN,
        sink_H: Tensor | None = None,
    ) -> Tensor:
        ring, ulysses = self.axes.ring, self.axes.ulysses
        if ulysses is not None:
            q_BHSA, k_BKSA, v_BKSA = to_heads((q_BHSA, k_BKSA, v_BKSA), ulysses)
            sink_H = None if sink_H is None else sink_H.chunk(ulysses.size())[ulysses.rank()]
        if ring is not None:
            out_BHSA = blockwise_attention(q_BHSA, k_BKSA, v_BKSA, packing, scores, sink_H, ring)
        else:
            out_BHSA = self.inner(q_BHSA, k_BKSA, v_BKSA, packing, scores, sink_H)
        return out_BHSA if ulysses is None else to_positions(out_BHSA, ulysses)


@op("setup.parallel.cp")
def spread_attention(
    model: ModelParts, rank: Rank, meshes: Meshes, ring: int, ulysses: int, matches: list[int]
) -> None:
    """Let every attention layer work on this rank's positions. Raises PlanMismatch unless there are as many as
    planned."""
    axes = model.axes
    axes.ring = meshes.group("ring") if ring > 1 else None
    axes.ulysses = meshes.group("ulysses") if ulysses > 1 else None
    axes.row = meshes.group("row")
    layers = [module for module in model.modules() if isinstance(module, AttentionModule)]
    planned = matches[rank.coordinates["pp"]]
    if len(layers) != planned:
        raise PlanMismatch(
            f"context parallel: {planned} attention layers are planned here, and {len(layers)} are built"
        )
    for layer in layers:
        layer.kernel = ContextKernel(layer.kernel, axes)


@op("setup.async_tp", traced=False)
def overlap_products(rank: Rank, meshes: Meshes) -> None:
    """Let torch.compile use its fused products, `symm_mem.fused_all_gather_matmul` and `fused_matmul_reduce_scatter`,
    instead of tensor parallelism's collectives (Inductor's pass `micro_pipeline_tp`).

    Raises EnvironmentFault X446 on other devices than CUDA.
    """
    if rank.device.type != "cuda":
        message = "parallel.tp.overlap needs shared memory of CUDA devices, but the device is cpu; use overlap false"
        raise EnvironmentFault("X446", message)
    config._micro_pipeline_tp = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # later versions of torch do this themselves
        enable_symm_mem_for_group(meshes.group("tp").group_name)


def make_unit(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    compute: str,
    reduce: str,
    reshard: bool,
    offload: bool,
    dimension: int = 0,
) -> None:
    """Shard what no unit inside `module` has sharded, along `dimension` of every parameter, with summed gradients.

    offload: shards, their gradients and the optimizer state are in host memory.
    """
    with _codes_without_gradients():
        fully_shard(
            module,
            mesh=mesh,
            shard_placement_fn=lambda parameter: Shard(dimension),
            mp_policy=MixedPrecisionPolicy(param_dtype=DTYPES[compute], reduce_dtype=DTYPES[reduce]),
            reshard_after_forward=reshard,
            offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy(),
            ignored_params=set() if isinstance(module, Experts) else whole_experts(module),
        )
    sum_gradients(module)


class _Modules:
    """Stand-in for `torch.nn` where FSDP creates parameters from shards."""

    def __getattr__(self, name: str) -> Any:
        return getattr(nn, name)

    def Parameter(self, data: Tensor, requires_grad: bool = True) -> nn.Parameter:
        return nn.Parameter(data, requires_grad=requires_grad and data.is_floating_point())


@contextmanager
def _codes_without_gradients() -> Iterator[None]:
    """Let FSDP shard integer codes: torch 2.11 requires gradients of every shard before it checks whether it may have
    any."""
    module: Any = _fsdp_param
    module.nn = _Modules()
    try:
        yield
    finally:
        module.nn = nn


def whole_experts(module: nn.Module) -> set[nn.Parameter]:
    """Return experts' parameters that expert FSDP does not shard: a rank owns them alone, outside of any dense mesh."""
    experts = [m for m in module.modules() if isinstance(m, Experts) and not isinstance(m, FSDPModule)]
    return {parameter for m in experts for parameter in m.parameters()}


def sum_gradients(module: nn.Module) -> None:
    """Make one FSDP module sum gradients: neither setting reaches the modules below it (torch 2.11 to 2.13)."""
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


@op("setup.parallel.fsdp")
def shard_blocks(
    model: ModelParts,
    rank: Rank,
    meshes: Meshes,
    pattern: str,
    matches: list[int],
    compute: str,
    reduce: str,
    reshard: bool,
    offload: bool,
) -> None:
    """Make every module whose name fits `pattern` a unit of its own.

    Raises PlanMismatch unless there are as many as in the plan.
    """
    # Blocks that give values to later ones return views of them, which no block changes in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    for _, unit in matching(model, pattern, matches, rank):
        make_unit(unit, meshes.fsdp, compute=compute, reduce=reduce, reshard=reshard, offload=offload)


@op("setup.parallel.root_fsdp")
def shard_root(model: ModelParts, meshes: Meshes, compute: str, reduce: str, reshard: bool, offload: bool) -> None:
    """Shard the rest of every part as one unit: embedding, last norm and head."""
    for part in model.parts:
        make_unit(part, meshes.fsdp, compute=compute, reduce=reduce, reshard=reshard, offload=offload)
        _end_backward(part)


def _end_backward(part: Transformer) -> None:
    """Let the lowest unit with a backward prefetch nothing: FSDP would gather the unit before it, which is never used
    if nothing below is trained."""
    if part.embed_tokens.weight.requires_grad if part.span.embeds else not part.begins_backward:
        return
    trained = (block for block in part.layers.values() if any(p.requires_grad for p in block.parameters()))
    lowest = next(trained, None)
    for module in [part] if lowest is None else lowest.modules():
        if isinstance(module, FSDPModule):
            module.set_modules_to_backward_prefetch([module])  # itself, which is already gathered


@op("setup.parallel.prefetch")
def gather_early(model: ModelParts, rank: Rank, units: list[int]) -> None:
    """Let every unit gather the next unit's parameters before it computes its forward.

    Otherwise the host gathers them when it reaches that unit, which is late after waiting for the device. units: their
    number on each pipeline coordinate; raises PlanMismatch for another number.
    """
    count = 0
    for part in model.parts:
        every = _in_order(part)
        count += len(every)
        for (one, again), (following, _) in pairwise(every):
            if not again:
                one.set_modules_to_forward_prefetch([following])
    if count != units[rank.coordinates["pp"]]:
        raise PlanMismatch(f"{count} units are gathered, but the plan has {units[rank.coordinates['pp']]}")


def _in_order(part: Transformer) -> list[tuple[FSDPModule, bool]]:
    """Return the units of a part in forward order, without modules that only training runs; and True for units that a
    backward calls again after the next unit's turn: experts of recomputed blocks."""
    units: list[tuple[nn.Module, bool]] = [(part, False)]
    for number, block in part.layers.items():
        if int(number) < part.arch.blocks:
            units.append((block, False))
            units += [(unit, block.recompute is not None) for unit in block.modules() if isinstance(unit, Experts)]
    return [(unit, again) for unit, again in units if isinstance(unit, FSDPModule)]


def is_sharded(model: ModelParts) -> bool:
    """Return True if this rank has only a piece of some parameter that FSDP manages."""
    meshes = (parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor))
    return any(
        name in (SHARD, EXPERT_SHARD) and mesh.size(axis) > 1
        for mesh in meshes
        for axis, name in enumerate(mesh.mesh_dim_names or ())
    )


def reshard(model: ModelParts) -> None:
    """Free gathered parameters everywhere.

    After a forward without backward the root keeps them, and `parameters()` would return these instead of the shards.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


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
    """Leave this rank its consecutive experts of every layer; tokens for other experts are sent to their ranks.

    meanwhile: computed while tokens are in transit: `shared` experts. Works on the meta device. Raises PlanMismatch
    unless as many modules fit `pattern` as in the plan.
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

    A rank computes all tokens sent to it, so gradients of ranks with the same experts are summed like those of dense
    parameters, and divided by nothing.
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
