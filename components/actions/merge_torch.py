"""`tick.merge`: add the adapter to the model under it, and begin a new one."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from xtrain.blocks.adapted import adapted_matrices
from xtrain.plan.parameters import name_of
from xtrain.plan.plan import Plan
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Progress, Rank
from xtrain.runtime.nn.adapters import first_values, merged
from xtrain.runtime.nn.batch import Step, StepCall
from xtrain.runtime.nn.layers import stream_of
from xtrain.runtime.nn.parallelize import reshard
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.nn.weights import fill, optimizer_tensors


@op("tick.merge", traced=False)
def merge_adapter(
    plan: Plan,
    model: ModelParts,
    optimizer: Optimizer,
    progress: Progress,
    rank: Rank,
    state: str,
    seed: int,
    adapter: dict[str, Any],
) -> StepCall:
    """Merge the adapter whenever the tick is due. Collective: each matrix is gathered, merged in fp32 or fp64 on every
    rank alike, and each rank keeps its shard.

    The values of the new adapter depend on the seed and the number of the step alone.
    """
    exact = torch.float64 if plan.node("setup.build_model").args["params"] == "fp64" else torch.float32
    factors: dict[str, list[Any]] = {}
    for tensor in plan.parameters.tensors:
        if tensor.adapter:
            factors.setdefault(tensor.adapter, []).append(tensor)

    @torch.no_grad()
    def merge(step: Step) -> None:
        reshard(model)
        parameters = dict(model.named_parameters())
        drawn = stream_of(f"{seed} merge {progress.step}")
        for layer, matrix in adapted_matrices(plan.architecture):
            name, start = name_of(layer, matrix.name), name_of(layer, "")
            if name not in parameters:  # of another stage
                continue
            own = factors[name]
            beside = {each.name.removeprefix(start): _whole(parameters[each.name]).to(exact) for each in own}
            fill(parameters[name], merged(matrix, _whole(parameters[name]).to(exact), beside))
            for each in own:
                fill(parameters[each.name], first_values(type(matrix), each, drawn, rank.device, adapter))
                if state == "reset":
                    optimizer.state[parameters[each.name]].clear()
        if state == "reset":
            optimizer_tensors(model, optimizer, plan)  # creates what is missing

    return merge


def _whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
