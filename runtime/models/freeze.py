"""`setup.freeze`: parameters that are not trained."""

from torch import nn

from xtrain.planner.architecture import EMBEDDING
from xtrain.planner.plan import Plan
from xtrain.runtime.models.build import DTYPES
from xtrain.runtime.models.parts import ModelParts
from xtrain.runtime.ops import PlanMismatch, op


@op("setup.freeze")
def freeze(plan: Plan, model: ModelParts, parameters: int, format: str) -> None:
    """Let the parameters that the plan does not train have no gradient; they are stored in `format`.

    Raises PlanMismatch unless the plan freezes so many `parameters`.
    """
    frozen = {tensor.name for tensor in plan.parameters.tensors if not tensor.trained}
    if (found := plan.parameters.total - plan.parameters.trained) != parameters:
        raise PlanMismatch(f"the plan freezes {found:,} parameters, and its node says {parameters:,}")
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if f"{path}.{name}" in frozen:
                still = nn.Parameter(parameter.detach().to(DTYPES[format]), requires_grad=False)
                module.register_parameter(name, still)
    stages = plan.node("setup.build_model").args["stages"]
    for part in model.parts:
        span = part.span
        part.begins_backward = len(stages) > 1 and not _trains_before(
            plan, span.last + 1 if span.embeds else span.first
        )


def _trains_before(plan: Plan, layer: int) -> bool:
    """Whether something is trained that a model computes before the block of a layer."""
    for tensor in plan.parameters.tensors:
        kind, number, *_ = tensor.name.split(".")
        if tensor.trained and (kind == EMBEDDING or (kind == "layers" and int(number) < layer)):
            return True
    return False
