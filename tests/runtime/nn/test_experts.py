"""Experts over ranks: what four processes compute together is what one computes alone."""

# shapes: B rows, S positions, D dim

import traceback
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mixtures import CLAMPED, PLAIN, ROUTERS, architecture, fill
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import TorchDispatchMode
from towers import tower

from xtrain.plan.architecture import Architecture
from xtrain.runtime.base.mesh import Meshes
from xtrain.runtime.base.ops import PlanMismatch
from xtrain.runtime.loop.metrics import RouterCounts, balance
from xtrain.runtime.nn import parallelize as fsdp
from xtrain.runtime.nn.axes import Axes, TensorAxis
from xtrain.runtime.nn.build import recompute_blocks, replay_routing
from xtrain.runtime.nn.moe import MoE
from xtrain.runtime.nn.parallelize import shard_experts, spread_experts
from xtrain.runtime.nn.transformer import ModelParts

pytestmark = pytest.mark.distributed

WORLD = 4
ROWS = 9
SHARDED = {"compute": "fp64", "reduce": "fp64", "reshard": True, "offload": False}


class Model(nn.Module):
    """Layers under the names that the whole model gives them."""

    def __init__(self, mixtures: dict[int, nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): nn.ModuleDict({"mlp": m}) for i, m in mixtures.items()})


def parts(mixtures: dict[int, nn.Module], axes: Axes) -> ModelParts:
    return ModelParts((Model(mixtures),), axes)  # pyright: ignore[reportArgumentType]


def rank_of(rank: int, world: int = WORLD) -> Any:
    return SimpleNamespace(
        rank=rank, world_size=world, coordinates={"pp": 0, "tp": 0}, device=torch.device("cpu"), is_first=rank == 0
    )


def meshes(**extents: int) -> Meshes:
    mesh = DeviceMesh("cpu", torch.arange(WORLD).view(*extents.values()), mesh_dim_names=tuple(extents))
    groups = {"ep": mesh.get_group("ep")} if "ep" in extents else {}
    return Meshes(mesh, mesh, groups)


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def summed(value: Tensor) -> Tensor:
    value = value.clone()
    dist.all_reduce(value)
    return value


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def batch(rank: int, arch: Architecture, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of a rank, no two ranks having as many: input, which positions are real, gradient of the output."""
    generator = torch.Generator().manual_seed(10 + rank)
    shape = (1 + rank % 2, 6 + rank, arch.dim)
    x_BSD, seed_BSD = (torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for _ in range(2))
    real_BS = torch.rand(shape[:2], generator=generator) < 0.8
    return x_BSD.requires_grad_(), real_BS, seed_BSD


def alone(arch: Architecture, dtype: torch.dtype, collapse: bool) -> tuple[MoE, list[Tensor], list[Tensor]]:
    """The whole layer after the batches of all ranks, its outputs and the gradients of its inputs."""
    moe = moe_layer(arch, Axes(), dtype, collapse)
    outs, grads = [], []
    for rank in range(WORLD):
        x_BSD, real_BS, seed_BSD = batch(rank, arch, dtype)
        x_BSD = as_wanted(x_BSD, collapse)
        out_BSD = moe(x_BSD, real_BS)
        (out_BSD * seed_BSD).sum().backward()
        assert x_BSD.grad is not None
        outs.append(out_BSD.detach())
        grads.append(x_BSD.grad)
    return moe, outs, grads


def moe_layer(arch: Architecture, axes: Axes, dtype: torch.dtype, collapse: bool) -> MoE:
    moe = MoE(arch, axes, ROWS, CLAMPED if arch.own.get("clamped") else PLAIN).to(dtype)
    fill(moe)
    if collapse:
        with torch.no_grad():
            moe.gate.weight[0], moe.gate.weight[1:] = 10, -10
    return moe


def as_wanted(x_BSD: Tensor, collapse: bool) -> Tensor:
    """With collapse: inputs that all go to the first expert, where the router is made for it."""
    return x_BSD.detach().abs().requires_grad_() if collapse else x_BSD


def errors(
    arch: Architecture, extents: dict[str, int], *, dtype: torch.dtype = torch.float64, collapse: bool = False, **more
) -> dict[str, float]:
    """Largest relative errors of this rank's outputs and gradients against the layer alone."""
    rank = dist.get_rank()
    single, outs, grads = alone(arch, dtype, collapse)
    axes, laid = Axes(), meshes(**extents)
    model = parts({0: moe_layer(arch, axes, dtype, collapse)}, axes)
    moe = model.parts[0].layers["0"]["mlp"]
    pattern = {"pattern": "layers.*.mlp.experts", "matches": [1]}
    if "ep" in extents:
        spread_experts(model, laid, rank_of(rank), size=extents["ep"], **pattern)
    if "ep_fsdp" in extents:
        name = "fp64" if dtype == torch.float64 else "fp32"
        policy = SHARDED | {"compute": name, "reduce": name} | more
        shard_experts(model, laid, rank_of(rank), **pattern, **({"dimension": 1} | policy))
    x_BSD, real_BS, seed_BSD = batch(rank, arch, dtype)
    x_BSD = as_wanted(x_BSD, collapse)
    out_BSD = moe(x_BSD, real_BS)
    (out_BSD * seed_BSD).sum().backward()
    assert x_BSD.grad is not None
    found = {"out": relative(out_BSD, outs[rank]), "x": relative(x_BSD.grad, grads[rank])}
    for name, parameter in moe.named_parameters():
        grad = whole(parameter.grad) if name.startswith("experts.") else summed(parameter.grad)
        found[name] = relative(grad, single.get_parameter(name).grad)
    loads_NE, aux_N = RouterCounts(model, rank_of(rank), 1, arch.experts).take()
    found["loads"] = float((loads_NE[0] - single.gate.loads_E).abs().max())
    found["aux"] = abs(float(aux_N[0] / single.gate.aux) - 1)
    return found


LAYOUTS: dict[str, dict[str, int]] = {
    "ep 4": {"ep": 4},
    "ep_fsdp 2 · ep 2": {"ep_fsdp": 2, "ep": 2},
    "ep_replicate 2 · ep_fsdp 1 · ep 2": {"ep_replicate": 2, "ep_fsdp": 1, "ep": 2},
    "ep_replicate 2 · ep_fsdp 2": {"ep_replicate": 2, "ep_fsdp": 2},
    "ep_fsdp 4": {"ep_fsdp": 4},
}


# Of a case that is tried in many ways: every layout, router and choice at least once, not each with each.
SHORT = False


def every_layout() -> None:
    layouts = list(LAYOUTS.items())
    for index, (router, fields) in enumerate({**ROUTERS, "biased experts": {"own": {"clamped": True}}}.items()):
        for layout, extents in layouts[index : index + 1] if SHORT else layouts:
            found = errors(architecture(**fields), extents)
            assert max(found.values()) < 1e-12, (router, layout, found)


def the_first_dimension() -> None:
    """More shards than experts of a rank: some hold nothing of it."""
    found = errors(architecture(experts=4), {"ep_fsdp": 2, "ep": 2}, dimension=0)
    assert max(found.values()) < 1e-12, found
    found = errors(architecture(experts=3), {"ep_fsdp": 4}, dimension=0)
    assert max(found.values()) < 1e-12, found


def fp32() -> None:
    for layout, extents in list(LAYOUTS.items())[:: 3 if SHORT else 1]:
        found = errors(architecture(), extents, dtype=torch.float32)
        assert max(found.values()) < 1e-5, (layout, found)


def ranks_without_tokens() -> None:
    arch = architecture(experts_per_token=1, router_normalise=False)
    for layout, extents in list(LAYOUTS.items())[: 2 if SHORT else None]:
        found = errors(arch, extents, collapse=True)
        # Experts that got nothing have a gradient, of zeros; the relative error is that of all experts together.
        assert max(found.values()) < 1e-12, (layout, found)


def averaged_gradients_are_seen() -> None:
    original = fsdp.sum_gradients
    fsdp.sum_gradients = lambda module: None
    try:
        found = errors(architecture(), {"ep_fsdp": 2, "ep": 2})
    finally:
        fsdp.sum_gradients = original
    assert found["experts.gate_proj"] > 0.4 and found["gate.weight"] < 1e-12, found


def wrong_plans_are_refused() -> None:
    axes = Axes()
    model = parts({0: moe_layer(architecture(), axes, torch.float64, False)}, axes)
    pattern = {"pattern": "layers.*.mlp.experts", "matches": [2]}
    with pytest.raises(PlanMismatch, match="fits 1 modules of the model, but the plan has 2"):
        spread_experts(model, meshes(ep=4), rank_of(dist.get_rank()), size=4, **pattern)


def with_tensor_parallel(sequence: bool) -> None:
    """Two data ranks of two tensor-parallel ranks each; experts spread over pairs, and sharded over the rest."""
    rank = dist.get_rank()
    arch = architecture(**ROUTERS["sigmoid, biased, with shared experts"])
    laid = meshes(ep_fsdp=2, ep=2)
    dense = DeviceMesh("cpu", torch.arange(WORLD).view(2, 2), mesh_dim_names=("shard", "tp"))
    group = dense.get_group("tp")
    axes = Axes(tensor=TensorAxis(group=group, sequence=sequence, loss=False), row=group)
    model = parts({0: moe_layer(arch, axes, torch.float64, False)}, axes)
    moe = model.parts[0].layers["0"]["mlp"]
    for module in (moe.gate, *(m for m in moe.shared_experts.modules() if isinstance(m, nn.Linear))):
        cut = DTensor.from_local(module.weight.detach(), dense["tp"], [Replicate()], run_check=False)
        module.register_parameter("weight", nn.Parameter(cut))
    pattern = {"pattern": "layers.*.mlp.experts", "matches": [1]}
    spread_experts(model, laid, rank_of(rank), size=2, **pattern)
    shard_experts(model, laid, rank_of(rank), **pattern, **SHARDED, dimension=1)

    single = moe_layer(arch, Axes(), torch.float64, False)
    data, place = divmod(rank, 2)
    # Whole positions do not divide by two where they are not cut outside of the layer.
    x_BSD, real_BS, seed_BSD = (t[:, : 8 if sequence else 7] for t in batch(2 + data, arch))
    x_BSD = x_BSD.detach().requires_grad_()
    out_BSD = single(x_BSD, real_BS)
    (out_BSD * seed_BSD).sum().backward()
    own = slice(4 * place, 4 * place + 4) if sequence else slice(None)
    ours_BSD = x_BSD.detach()[:, own].requires_grad_()
    result_BSD = moe(ours_BSD, real_BS)
    (result_BSD * seed_BSD[:, own]).sum().backward()
    assert relative(result_BSD, out_BSD[:, own]) < 1e-12
    assert relative(ours_BSD.grad, x_BSD.grad[:, own]) < 1e-12
    for name, parameter in moe.named_parameters():
        # Every rank of a pair has worked out the same two sums in `single`; each pair its own.
        wanted = summed(single.get_parameter(name).grad) / 2
        grad = whole(parameter.grad)
        if not name.startswith("experts."):
            grad = summed(grad) / 2
        assert relative(grad, wanted) < 1e-12, (name, sequence)
    loads_NE, aux_N = RouterCounts(model, rank_of(rank), 1, arch.experts).take()
    assert torch.equal(loads_NE[0], summed(single.gate.loads_E) / 2)
    assert abs(float(aux_N[0] / (summed(single.gate.aux) / 2)) - 1) < 1e-12


def biases_move_alike() -> None:
    """Two layers on two ranks each, as two pipeline stages have them."""
    rank = dist.get_rank()
    arch = architecture(layers=2, **ROUTERS["sigmoid, biased, with shared experts"])
    layer = rank // 2
    model = parts({layer: moe_layer(arch, Axes(), torch.float64, False)}, Axes())
    gate = model.parts[0].layers[str(layer)]["mlp"].gate
    before_E = gate.e_score_correction_bias.clone()
    plan: Any = SimpleNamespace(architecture=arch)
    run = balance(plan, model, rank_of(rank), speed=0.5)
    x_BSD, real_BS, _ = batch(rank, arch)
    counted_E = 0
    for _ in range(2):
        gate(x_BSD, real_BS)
        gate.eval()(x_BSD, real_BS)
        gate.train()
        both_NE = torch.zeros(2, arch.experts, dtype=torch.int64)
        # Counters only grow; a step's load is what they grew by.
        both_NE[layer] = gate.loads_E - counted_E
        counted_E = gate.loads_E.clone()
        load_E = summed(both_NE)[layer].double()
        bias_E = gate.e_score_correction_bias.clone()
        run(None)  # pyright: ignore[reportArgumentType]
        wanted_E = 0.5 * torch.sign(load_E.mean() - load_E)
        assert torch.allclose(gate.e_score_correction_bias - bias_E, wanted_E, atol=1e-12)
    assert not torch.equal(before_E, gate.e_score_correction_bias)
    gathered = [torch.empty_like(before_E) for _ in range(WORLD)]
    dist.all_gather(gathered, gate.e_score_correction_bias)
    assert torch.equal(gathered[2 * layer], gathered[2 * layer + 1])


def recomputed_blocks() -> None:
    """Checkpoints around experts that are FSDP units of their own, in blocks that are; two forwards, then backwards."""
    rank = dist.get_rank()
    arch = architecture(layers=2)
    plain: list[Tensor] = []
    words = ["matmul", "attention", "all_to_all"]
    for reshard in (True, False):
        for save in ((None, words) if reshard else (words[:1],)) if SHORT else (None, [], words[:1], words):
            model = tower(arch, rows=ROWS)
            laid = meshes(ep_fsdp=2, ep=2)
            spread_experts(model, laid, rank_of(rank), size=2, pattern="layers.*.mlp.experts", matches=[2])
            if save is not None:
                mode = "selective" if save else "full"
                recompute_blocks(model, rank_of(rank), mode, 1, "layers.*", [2], save)
                replay_routing(model, rank_of(rank), [2])
            policy = SHARDED | {"reshard": reshard}
            shard_experts(model, laid, rank_of(rank), "layers.*.mlp.experts", [2], 1, **policy)
            stage = model.parts[0]
            for module in (*stage.layers.values(), stage):
                fully_shard(module, mesh=laid.experts["ep_fsdp"], reshard_after_forward=reshard)
            batches = [batch(rank + 4 * number, arch) for number in range(2)]
            losses = [(stage(x_BSD, real_BS) * seed_BSD).sum() for x_BSD, real_BS, seed_BSD in batches]
            exchanged = Exchanges()
            for loss in losses:
                with exchanged:
                    loss.backward()
            # Two layers, two batches; counts, rows there and back; the gradients of the rows.
            assert exchanged.calls == 2 * 2 * {None: 2, 0: 5, 1: 5, 3: 2}[save if save is None else len(save)]
            grads = [whole(p.grad) for p in model.parameters()]
            plain = plain or grads
            assert all(torch.equal(a, b) for a, b in zip(grads, plain, strict=True)), (reshard, save)


class Exchanges(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func is torch.ops._c10d_functional.all_to_all_single.default
        return func(*args, **(kwargs or {}))


CASES: dict[str, Callable[[], None]] = {
    "every layout": every_layout,
    "sharded along the experts": the_first_dimension,
    "fp32": fp32,
    "ranks without tokens": ranks_without_tokens,
    "averaged gradients are seen": averaged_gradients_are_seen,
    "wrong plans are refused": wrong_plans_are_refused,
    "tensor parallel, whole positions": partial(with_tensor_parallel, False),
    "tensor parallel, cut positions": partial(with_tensor_parallel, True),
    "biases move alike": biases_move_alike,
    "recomputed blocks": recomputed_blocks,
}


def check(rank: int, world: int, short: bool) -> dict[str, str]:
    """All cases, one after the other: of those that fail, on this rank, why."""
    global SHORT
    SHORT = short
    found = {}
    for case, holds in CASES.items():
        try:
            holds()
        except Exception:
            found[case] = traceback.format_exc()
    return found


@pytest.fixture(scope="module", params=[True, pytest.param(False, marks=pytest.mark.slow)], ids=["short", "all"])
def failures(request, tmp_path_factory) -> list[dict[str, str]]:
    """By rank; the ranks are started once for all cases."""
    return on_ranks(WORLD, check, tmp_path_factory.mktemp("experts"), request.param)


@pytest.mark.parametrize("case", CASES)
def test_ranks_together(case, failures):
    failed = {rank: found[case] for rank, found in enumerate(failures) if case in found}
    assert not failed, "\n".join(f"rank {rank}: {text}" for rank, text in failed.items())
