"""`setup.dropout`: which matrices drop what goes into them."""

from xtrain.planner.plan import Plan
from xtrain.runtime.models.block import DecoderBlock
from xtrain.runtime.models.dropout import Dropout, DropsInputs
from xtrain.runtime.models.moe import MoE
from xtrain.runtime.models.parts import ModelParts
from xtrain.runtime.ops import PlanMismatch, op


@op("setup.dropout")
def set_dropout(plan: Plan, model: ModelParts, seed: int, share: float, matrices: int) -> None:
    """Let A of every adapter drop a share of its inputs in training.

    Raises PlanMismatch unless the plan has so many `matrices` with an adapter, and all modules drop inputs that have
    one.
    """
    names = {tensor.adapter for tensor in plan.parameters.tensors if tensor.adapter}
    if len(names) != matrices:
        raise PlanMismatch(f"{len(names)} matrices have an adapter, and the node of dropout says {matrices}")
    own = names & {name for name, _ in model.named_parameters()}
    for path, block in model.named_modules():
        if not isinstance(block, DecoderBlock):
            continue
        for name, module in block.named_modules():
            if isinstance(module, DropsInputs):
                module.dropout = Dropout.of(f"{path}.{name}.weight", share, seed)
                block.dropping.append(module)
                own.discard(f"{path}.{name}.weight")
            elif isinstance(module, MoE) and module.experts.adapters:
                stacks = {matrix: f"{path}.{name}.experts.{matrix}" for matrix in module.experts.adapters}
                module.experts.dropout = {matrix: Dropout.of(each, share, seed) for matrix, each in stacks.items()}
                block.dropping.append(module)
                own.difference_update(stacks.values())
    if own:
        raise PlanMismatch(f"nothing drops what goes into the adapter of {min(own)}")
    for part in model.parts:
        part.drops = True
