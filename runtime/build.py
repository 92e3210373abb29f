"""`setup.build_model`: the model on the meta device, held against the plan's inventory name by name."""

import torch
from torch import nn

from ..planner.architecture import Architecture
from ..planner.plan import Plan
from .models.transformer import Transformer
from .ops import PlanMismatch, op
from .state import Rank

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}


@op("setup.build_model", gives="model")
def build_model(
    plan: Plan,
    rank: Rank,
    architecture: Architecture,
    attention: dict[str, str],
    params: str,
    z_loss: float,
    chunk_bytes: int,
) -> nn.Module:
    """Build without memory; `setup.weights` gives it values. `attention` maps a device type to a kernel."""
    with torch.device("meta"):
        model = Transformer(
            architecture, kernel=attention[rank.device.type], z_loss=z_loss, chunk_bytes=chunk_bytes
        ).to(DTYPES[params])
    assert_matches_plan(model, plan)
    return model


def assert_matches_plan(model: nn.Module, plan: Plan) -> None:
    """Raise PlanMismatch unless the model has exactly the plan's parameters, by name, shape and order."""
    built = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    planned = [(p.name, p.shape) for p in plan.parameters.tensors]
    if built == planned:
        return
    missing, extra = dict(planned).items() - dict(built).items(), dict(built).items() - dict(planned).items()
    raise PlanMismatch(
        f"the model is not the planned one: planned but not built {sorted(missing)[:5]}, "
        f"built but not planned {sorted(extra)[:5]}"
    )
