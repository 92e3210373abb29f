"""Start of a rank (`setup.bootstrap`): device, threads, number formats, process group and signals."""

import os
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from xtrain.plan.plan import Mesh, Plan
from xtrain.records.training_events import DeviceEvent
from xtrain.runtime.base import device as streams
from xtrain.runtime.base.device import peak_flops
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.ops import PlanMismatch, op
from xtrain.runtime.base.process import ReplicaGroup
from xtrain.runtime.base.state import Rank
from xtrain.runtime.loop.preflight import check_device, check_world
from xtrain.runtime.nn.build import compute_format
from xtrain.runtime.observe.records import Records
from xtrain.runtime.observe.stopping import StopRequests

# Ranks wait this long for the slowest in a collective; the longest wait is for tokenizing a large dataset.
TIMEOUT = timedelta(hours=2)


@op("setup.bootstrap", gives="rank", traced=False)
def bootstrap(
    plan: Plan,
    requests: StopRequests,
    records: Records,
    seed: int,
    device: str,
    threads: int | None,
    matmul: str,
    axes: list,
    stop_deadline_seconds: float,
    small_products: bool = False,
    lazily: bool = False,
    cuda: dict[str, Any] | None = None,
    store: Store | None = None,
    replica: ReplicaGroup | None = None,
) -> Rank:
    """Join the process group described by RANK, WORLD_SIZE and LOCAL_RANK; without them run alone.

    small_products: see `set_matmul`. lazily: gloo ranks connect on first use. cuda: settings for a CUDA device:
    `allocator`, `nccl` (environment), and `collect_steps` of the training loop. store: the store of this start; None:
    take the address from the environment. replica: this rank's replica group, of several.

    Raises EnvironmentFault if the world size differs from the plan or the device is missing.
    """
    requests.deadline_seconds = stop_deadline_seconds
    world = int(os.environ.get("WORLD_SIZE", "1"))
    check_world(plan, world)
    number = int(os.environ.get("RANK", "0"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    chosen = choose_device(device, local)
    check_device(plan, chosen.type)
    if cuda is not None and chosen.type == "cuda":
        torch._C._accelerator_setAllocatorSettings(cuda["allocator"])  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        os.environ.update(cuda.get("nccl", {}))  # read when a process group is created
    if device == "auto" and matmul == "auto":
        warn_of_slow_products(compute_format(plan), chosen, records)
    use_threads(threads, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    in_force = set_matmul(matmul, chosen, small_products=small_products)
    count, version = torch.get_num_threads(), str(torch.__version__)
    records.event(DeviceEvent(step=0, device=str(chosen), threads=count, matmul=in_force, torch=version))
    mesh: Mesh = plan.mesh
    if world > 1:
        if lazily:
            os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # read by gloo for every group
        backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=TIMEOUT, store=store or _own_store(), rank=number, world_size=world)
    assert [[a.name, a.size] for a in mesh.axes] == [list(a) for a in axes]
    rank = Rank(
        rank=number,
        # Local rank within its own group; another group may come first on this machine.
        local_rank=min(local, number),
        world_size=world,
        data_rank=mesh.data_rank(number),
        data_ranks=mesh.data_ranks,
        device=chosen,
        pipeline_ranks=mesh.size("pp"),
        coordinates=mesh.coordinates(number),
        replica=replica,
    )
    streams.begin(seed, 0, rank.row_rank)
    return rank


@op("setup.deterministic", traced=False)
def use_deterministic_algorithms(workspaces: str) -> None:
    """Set deterministic algorithms before this process computes anything. workspaces: of cuBLAS, which reads the
    variable at its start."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = workspaces
    torch.use_deterministic_algorithms(True)


@op("setup.batch_invariant", traced=False)
def use_invariant_kernels(rows: int, queries: int, keys: int) -> None:
    """Compute everything of this process batch-invariantly. Threads would split a tensor by its size, so there is one.
    Raises PlanMismatch for tiles of other sizes."""
    from xtrain.runtime.nn import invariant  # only for runs that ask for it

    if (rows, queries, keys) != (invariant.TILE, invariant.QUERIES, invariant.KEYS):
        raise PlanMismatch(
            f"the plan has tiles of {rows} rows, {queries} queries and {keys} keys, and there are others"
        )
    torch.set_num_threads(1)
    invariant.Invariant().__enter__()


def choose_device(kind: str, local_rank: int) -> torch.device:
    """Return the device of this rank; `auto` is cuda if there is one. Raises EnvironmentFault if it is missing."""
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        message = f"local rank {local_rank} needs a CUDA device of its own; this machine has {count or 'none'}"
        raise EnvironmentFault("X702", message)
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def warn_of_slow_products(form: str, device: torch.device, records: Records) -> None:
    """Warn of fp32 products on a GPU that the plan did not know of, and of bf16 products on one without units for
    them. form: number format of forward and backward."""
    if device.type != "cuda" or form not in ("fp32", "bf16"):
        return
    rates = {each: peak_flops(device, each) for each in ("fp32", "bf16", "fp16")}
    faster = "fp16" if rates["fp16"] and not rates["bf16"] else "bf16"
    if form == faster:
        return
    own, other = rates["fp32"], rates[faster]
    slower = f"{other / own:.0f} times" if own and other else "10 to 30 times"
    message = f"the model computes in {form}, whose matrix products are about {slower} slower than in {faster} on this "
    records.warn(f"{message}GPU; use precision {{ compute = {faster} }}", step=0, code="W427")


def _own_store() -> Store:
    store, _, _ = next(rendezvous("env://", timeout=TIMEOUT))
    return store


def use_threads(threads: int | None, local_world: int) -> None:
    """Set the CPU threads of this rank; None: OMP_NUM_THREADS if set, else an even share of the cores."""
    if threads is None and "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, len(os.sched_getaffinity(0)) // local_world)
    if threads is not None:
        torch.set_num_threads(threads)
    # MKL's vector functions (cos, exp, log …) choose their accuracy in a process's first call: with two threads in that
    # call, one computed fp32 cosines that were wrong in the fourth digit.
    torch.ones(16).cos()


def set_matmul(setting: str, device: torch.device, *, small_products: bool = False) -> str:
    """Choose how fp32 matrix products are computed; return the setting in force.

    `auto` takes `medium` on a CPU whose products keep fp32 accuracy under it: there it selects another library, not
    another format. If the probe sees rounded inputs, or on a GPU, `highest` stays. small_products: products are so
    small that the other library is slower; `highest` stays too.
    """
    if setting == "auto":
        faster = device.type == "cpu" and not small_products and _medium_is_exact()
        setting = "medium" if faster else "highest"
    torch.set_float32_matmul_precision(setting)
    return setting


# Shapes of the probe: torch 2.11 rounds inputs only of batches and of large matrices.
_PROBED = (((64, 512), (512, 64)), ((4, 64, 64), (4, 64, 64)), ((512, 512), (512, 512)))


@cache
def _medium_is_exact() -> bool:
    """Return True if products under `medium` are as close to fp64 as under `highest`: once for a process, as its
    processor stays. The first call changes the precision in force, which the caller then sets."""
    generator = torch.Generator().manual_seed(0)
    drawn = [tuple(torch.randn(shape, generator=generator) for shape in pair) for pair in _PROBED]
    exact = [left.double() @ right.double() for left, right in drawn]

    def apart() -> list[float]:
        return [
            float((left @ right - product).abs().max()) for (left, right), product in zip(drawn, exact, strict=True)
        ]

    torch.set_float32_matmul_precision("highest")
    reference = apart()
    torch.set_float32_matmul_precision("medium")
    return all(error <= 4 * least for error, least in zip(apart(), reference, strict=True))
