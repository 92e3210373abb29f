"""`setup.float8`: which matrices are multiplied in fp8, and whether the device can."""

import torch

from xtrain.dsl.schema.fp8 import RECIPES
from xtrain.planner.mesh.sharding import fits, tensor_rules
from xtrain.planner.plan import Plan
from xtrain.runtime.errors import EnvironmentFault
from xtrain.runtime.models.fp8 import Fp8Matrix
from xtrain.runtime.models.layers import Linear
from xtrain.runtime.models.parts import ModelParts
from xtrain.runtime.ops import PlanMismatch, op
from xtrain.runtime.state import Rank

# The first compute capability with products in fp8: Ada.
CAPABILITY = (8, 9)


@op("setup.float8")
def multiply_in_fp8(plan: Plan, model: ModelParts, rank: Rank, recipe: str, matrices: dict[str, list[int]]) -> None:
    """Let matrices of blocks be multiplied in fp8. matrices: name inside a block → the layers that it is one of.

    Raises PlanMismatch where one of them is none of a `Linear`, and EnvironmentFault X443 on a CUDA device that has no
    such products.
    """
    check_device(rank.device)
    chosen = RECIPES[recipe]()
    wanted = {f"layers.{layer}.{name}" for name, layers in matrices.items() for layer in layers}
    rules = tensor_rules(plan.architecture) if model.axes.tensor is not None else ()
    for part in model.parts:
        for path, module in part.named_modules():
            if path not in wanted:
                continue
            if not isinstance(module, Linear):
                raise PlanMismatch(f"`{path}` is multiplied in fp8 by the plan, and a {type(module).__name__} is not")
            cut = next((style for pattern, style in rules if fits(path, pattern)), None)
            module.fp8 = Fp8Matrix(chosen, model.axes, cut, own_tokens=module.partial)


def check_device(device: torch.device) -> None:
    """Raises EnvironmentFault X443 for a CUDA device without products in fp8."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) >= CAPABILITY:
        return
    name, found = torch.cuda.get_device_name(device), ".".join(map(str, torch.cuda.get_device_capability(device)))
    wanted = ".".join(map(str, CAPABILITY))
    message = f"precision.compute is fp8, and {name} has no products of it: its compute capability is {found}, below "
    raise EnvironmentFault("X443", f"{message}{wanted}; use compute bf16")
