"""`setup.weights`: initial values that depend on the seed and the parameter's name alone, not on the layout."""

import math
from hashlib import blake2b

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..planner.plan import Plan
from .ops import op
from .state import Rank

# Their outputs are added to the residual stream 2·layers times (GPT-2: scaled down by the root of that).
RESIDUAL = ("o_proj.weight", "down_proj.weight", "experts.down_proj")


@op("setup.weights")
@torch.no_grad()
def initialise(plan: Plan, model: nn.Module, rank: Rank, seed: int, init_std: float) -> None:
    """Give memory and values to every parameter: norms 1, matrices normal with `init_std`.

    Each value is drawn in fp32 for the whole parameter and then cut, so every rank of every layout, and every number
    format, starts from the same model.
    """
    model.to_empty(device=rank.device)
    tie(model)
    residual_std = init_std / math.sqrt(2 * plan.architecture.layers)
    for name, parameter in model.named_parameters():
        std = residual_std if name.endswith(RESIDUAL) else init_std
        _fill(parameter, initial_values(name, tuple(parameter.shape), std, seed, rank.device))


def initial_values(name: str, shape: tuple[int, ...], std: float, seed: int, device: torch.device) -> Tensor:
    """The whole parameter `name` in fp32."""
    if len(shape) == 1:
        return torch.ones(shape, device=device)
    digest = blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    # The top bit stays clear: some generators take signed seeds.
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest) >> 1)
    return torch.empty(shape, device=device).normal_(0.0, std, generator=generator)


def _fill(parameter: Tensor, whole: Tensor) -> None:
    whole = whole.to(parameter.dtype)
    if isinstance(parameter, DTensor):
        cut = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(cut.to_local())
    else:
        parameter.copy_(whole)


def tie(model: nn.Module) -> None:
    """Make the head the embedding again: giving memory to a model makes two parameters of a shared one."""
    if model.arch.tie_embeddings:  # pyright: ignore[reportAttributeAccessIssue]
        model.lm_head.weight = model.embed_tokens.weight  # pyright: ignore[reportAttributeAccessIssue]
