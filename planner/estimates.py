"""What a run costs, in closed forms: parameters, floating-point operations, bytes of model state and checkpoints."""

from .architecture import Architecture, ParameterSpec, block_parameters, parameters
from .arithmetic import Arithmetic
from .plan import Estimates, Memory, Parameters, RankClass
from .sharding import EMBEDDING, HEAD, Cuts
from .stages import Pipeline

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2}

SOURCES = {
    "flops_per_token": "6 · parameters in matrix products + 12 · layers · heads · head_dim · sequence; the embedding "
    "table left out, the head counted, experts by those a token uses, no discount for causality, recomputation not "
    "counted (PaLM, arXiv 2204.02311, appendix B)",
    "memory": "parameters, gradients and two AdamW moments in the format of the parameters, cut by tp, fsdp and ep; "
    "of the ranks of a pipeline coordinate the one with the largest pieces (ZeRO stage 3, arXiv 1910.02054)",
    "checkpoint_bytes": "parameters and two moments in the format of the parameters",
}


def count_parameters(architecture: Architecture) -> Parameters:
    """The inventory. A token uses all parameters but the experts it is not sent to."""
    tensors = tuple(parameters(architecture))
    total = sum(tensor.size for tensor in tensors)
    experts = sum(tensor.size for tensor in tensors if tensor.expert)
    active = total
    if architecture.is_moe:
        active -= experts // architecture.experts * (architecture.experts - architecture.experts_per_token)
    return Parameters(total=total, active=active, tensors=tensors)


def matmul_parameters(architecture: Architecture) -> int:
    """Weights a token is multiplied with: matrices of blocks and the head, tied or not; no lookup, no norms."""
    return architecture.layers * block_matmul_parameters(architecture) + architecture.vocab * architecture.dim


def block_matmul_parameters(architecture: Architecture) -> int:
    """Those of one block; of the routed experts, as many as a token is sent to."""
    return sum(
        tensor.size * architecture.experts_per_token // architecture.experts if tensor.expert else tensor.size
        for tensor in block_parameters(architecture)
        if len(tensor.shape) > 1
    )


def flops_per_token(architecture: Architecture, sequence: int) -> int:
    """Training FLOPs of one token (forward 2, backward 4 a weight); see SOURCES."""
    attention = 12 * architecture.layers * architecture.heads * architecture.head_dim * sequence
    return 6 * matmul_parameters(architecture) + attention


def estimate(
    architecture: Architecture,
    inventory: Parameters,
    cuts: Cuts,
    pipeline: Pipeline,
    batch: Arithmetic,
    *,
    params_format: str,
    ranks: int,
) -> Estimates:
    """All estimates of a run, once for each pipeline coordinate, which has `ranks` ranks."""
    width = BYTES[params_format]
    per_token = flops_per_token(architecture, batch.sequence)
    return Estimates(
        tokens_per_step=batch.tokens_per_step,
        flops_per_token=per_token,
        flops_per_step=per_token * batch.tokens_per_step,
        checkpoint_bytes=checkpoint_bytes(inventory, params_format),
        classes=tuple(_classes(architecture, inventory, cuts, pipeline, width, ranks)),
        times=None,
        sources=SOURCES,
    )


def checkpoint_bytes(inventory: Parameters, params_format: str) -> int:
    """Bytes of a full checkpoint over all ranks; see SOURCES."""
    return 3 * BYTES[params_format] * inventory.total


def _classes(
    architecture: Architecture, inventory: Parameters, cuts: Cuts, pipeline: Pipeline, width: int, ranks: int
) -> list[RankClass]:
    """Of every coordinate the first rank, whose pieces are the largest; `placement.held` has those of any rank."""
    block = cuts.largest(block_tensors(inventory))  # all blocks are alike: count one, multiply
    ends = {tensor.name: tensor for tensor in inventory.tensors if not tensor.name.startswith("layers.")}
    classes = []
    for pp, blocks in enumerate(pipeline.blocks()):
        elements = block * blocks + cuts.largest(ends[name] for name in end_names(architecture, pipeline, pp))
        memory = Memory(parameters=width * elements, gradients=width * elements, optimizer=2 * width * elements)
        classes.append(RankClass(pp=pp, ranks=ranks, memory=memory))
    return classes


def end_names(architecture: Architecture, pipeline: Pipeline, pp: int) -> list[str]:
    """The parameters besides blocks on a coordinate, in the order of the inventory.

    A tied head on another rank than the embedding is a copy of it under the same name.
    """
    names = []
    if pipeline.holds_first(pp) or (architecture.tie_embeddings and pipeline.holds_last(pp)):
        names.append(f"{EMBEDDING}.weight")
    if pipeline.holds_last(pp):
        names.append("norm.weight")
        if not architecture.tie_embeddings:
            names.append(f"{HEAD}.weight")
    return names


def block_tensors(inventory: Parameters) -> list[ParameterSpec]:
    """The parameters of one block."""
    return [t for t in inventory.tensors if t.name.startswith("layers.0.")]
