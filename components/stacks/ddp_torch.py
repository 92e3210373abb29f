"""`setup.parallel.ddp`: the whole model on every rank, gradients reduced by DistributedDataParallel."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from xtrain.runtime.base.ops import op
from xtrain.runtime.nn.pipeline import WrappedModel
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.observe.heartbeat import WAITS


@op("setup.parallel.ddp", gives="wrapped")
def replicate(model: ModelParts) -> WrappedModel:
    """Wrap the model for training."""
    # Every rank has drawn the same weights by name: there is nothing to broadcast.
    ddp = DistributedDataParallel(model.whole, init_sync=False, broadcast_buffers=False)
    ddp.register_comm_hook(None, _sum)

    def sync_gradients(on: bool) -> None:
        ddp.require_backward_grad_sync = on

    return WrappedModel(forward=ddp, sync_gradients=sync_gradients)


def _sum(_: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Sum gradients where DDP's own hook would average: the loss is already divided by the tokens of all ranks."""
    whole = bucket.buffer()
    work = dist.all_reduce(whole, async_op=True)
    assert work is not None
    came = WAITS.bucket_sent(last=bucket.is_last())

    def take(_: object) -> Tensor:
        came()
        return whole

    return work.get_future().then(take)
