"""The torch side of `summing`."""

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from xtrain.runtime.base.mesh import Meshes
from xtrain.runtime.base.ops import op
from xtrain.runtime.nn.pipeline import WrappedModel
from xtrain.runtime.nn.transformer import ModelParts


@op("setup.parallel.summing", gives="wrapped")
def sum_one_by_one(model: ModelParts, meshes: Meshes, tensors: int) -> WrappedModel:
    parameters = list(model.parameters())
    assert len(parameters) == tensors
    last = True

    def switch(on: bool) -> None:
        nonlocal last
        last = on

    def add(parameter: Tensor) -> None:
        grad = parameter.grad
        assert grad is not None
        if last and meshes.has("replicate"):
            dist.all_reduce(grad.to_local() if isinstance(grad, DTensor) else grad, group=meshes.group("replicate"))

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(add)
    return WrappedModel(forward=model.whole, sync_gradients=switch)
