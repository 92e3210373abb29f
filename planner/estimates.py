"""What a run costs, in closed forms: parameters, floating-point operations, bytes of model state and checkpoints."""

from .architecture import Architecture, ParameterSpec, parameters
from .arithmetic import Arithmetic
from .plan import Estimates, Mesh, Parameters, RankMemory
from .sharding import Cuts
from .stages import stage_layers, stages_of_rank

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2}

SOURCES = {
    "flops_per_token": "6 · parameters in matrix products + 12 · layers · heads · head_dim · sequence; the embedding "
    "table left out, the head counted, experts by those a token uses, no discount for causality, recomputation not "
    "counted (PaLM, arXiv 2204.02311, appendix B)",
    "memory": "parameters, gradients and two AdamW moments in the format of the parameters, cut by tp, fsdp and ep; "
    "the rank with the largest pieces (ZeRO stage 3, arXiv 1910.02054)",
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
    layer = sum(
        tensor.size * architecture.experts_per_token // architecture.experts if tensor.expert else tensor.size
        for tensor in parameters(architecture)
        if tensor.name.startswith("layers.0.") and len(tensor.shape) > 1
    )
    return architecture.layers * layer + architecture.vocab * architecture.dim


def flops_per_token(architecture: Architecture, sequence: int) -> int:
    """Training FLOPs of one token (forward 2, backward 4 a weight); see SOURCES."""
    attention = 12 * architecture.layers * architecture.heads * architecture.head_dim * sequence
    return 6 * matmul_parameters(architecture) + attention


def estimate(
    architecture: Architecture,
    inventory: Parameters,
    mesh: Mesh,
    cuts: Cuts,
    batch: Arithmetic,
    *,
    stages_per_rank: int,
    params_format: str,
) -> Estimates:
    """All estimates of a run; memory once for each pipeline coordinate."""
    width = BYTES[params_format]
    per_token = flops_per_token(architecture, batch.sequence)
    return Estimates(
        tokens_per_step=batch.tokens_per_step,
        flops_per_token=per_token,
        flops_per_step=per_token * batch.tokens_per_step,
        memory=tuple(_memory(architecture, inventory, mesh, cuts, stages_per_rank, width)),
        checkpoint_bytes=checkpoint_bytes(inventory, params_format),
        sources=SOURCES,
    )


def checkpoint_bytes(inventory: Parameters, params_format: str) -> int:
    """Bytes of a full checkpoint over all ranks; see SOURCES."""
    return 3 * BYTES[params_format] * inventory.total


def _memory(
    architecture: Architecture, inventory: Parameters, mesh: Mesh, cuts: Cuts, stages_per_rank: int, width: int
) -> list[RankMemory]:
    size = mesh.size("pp")
    spans = stage_layers(architecture.layers, size * stages_per_rank)
    # All blocks are alike: count one, multiply.
    block = sum(cuts.largest(t) for t in inventory.tensors if t.name.startswith("layers.0."))
    first, last = _ends(inventory, cuts, tied=architecture.tie_embeddings)
    memory = []
    for pp in range(size):
        stages = stages_of_rank(pp, size, stages_per_rank)
        elements = block * sum(spans[stage][1] - spans[stage][0] + 1 for stage in stages)
        if 0 in stages:
            elements += first
        if len(spans) - 1 in stages:
            elements += last
            # A tied head on the same rank is the embedding itself; on another one it is a copy.
            if architecture.tie_embeddings and 0 in stages:
                elements -= first
        memory.append(
            RankMemory(pp=pp, parameters=width * elements, gradients=width * elements, optimizer=2 * width * elements)
        )
    return memory


def _ends(inventory: Parameters, cuts: Cuts, *, tied: bool) -> tuple[int, int]:
    """Elements on the first stage besides its layers, and on the last one."""

    def piece(name: str) -> int:
        return cuts.largest(next(t for t in inventory.tensors if t.name == name))

    embedding = piece("embed_tokens.weight")
    return embedding, piece("norm.weight") + (embedding if tied else piece("lm_head.weight"))


def block_tensors(inventory: Parameters) -> list[ParameterSpec]:
    """The parameters of one block."""
    return [t for t in inventory.tensors if t.name.startswith("layers.0.")]
