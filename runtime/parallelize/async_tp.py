"""`setup.async_tp`: products of matrices that go on while pieces of what they take, or give, travel between ranks."""

import warnings

from torch._inductor import config
from torch.distributed._symmetric_memory import enable_symm_mem_for_group

from xtrain.runtime.errors import EnvironmentFault
from xtrain.runtime.ops import op
from xtrain.runtime.parallel.mesh import Meshes
from xtrain.runtime.state import Rank


@op("setup.async_tp")
def overlap_products(rank: Rank, meshes: Meshes) -> None:
    """Let torch.compile put its fused products, `symm_mem.fused_all_gather_matmul` and `fused_matmul_reduce_scatter`,
    in the place of tensor parallel's collectives (Inductor's pass `micro_pipeline_tp`).

    Raises EnvironmentFault X446 where the device is not one of CUDA.
    """
    if rank.device.type != "cuda":
        message = "parallel.tp.overlap uses memory that CUDA devices share, and the device is cpu: use overlap false"
        raise EnvironmentFault("X446", message)
    config._micro_pipeline_tp = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # later versions of torch do so by themselves
        enable_symm_mem_for_group(meshes.group("tp").group_name)
