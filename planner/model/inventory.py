"""What a model is made of, counted: parameters, weights that a token is multiplied with, floating-point operations."""

from collections import Counter

from ..architecture import Architecture, ParameterSpec, block_parameters, parameters
from ..plan import Parameters, Work
from ..units import BYTES


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
    blocks = sum(len(kind.layers) * block_matmul_parameters(architecture, kind.first) for kind in architecture.kinds)
    return blocks + architecture.vocab * architecture.dim


def block_matmul_parameters(architecture: Architecture, layer: int) -> int:
    """Those of the block of one layer; of the routed experts, as many as a token is sent to."""
    return sum(
        tensor.size * architecture.experts_per_token // architecture.experts if tensor.expert else tensor.size
        for tensor in block_parameters(architecture, layer)
        if len(tensor.shape) > 1
    )


def training_work(architecture: Architecture) -> Work:
    """Operations without recomputation (forward 2, backward 4 a weight); see `estimates.SOURCES`."""
    pair = 12 * architecture.layers * architecture.heads * architecture.head_dim
    return Work(position=6 * matmul_parameters(architecture), pair=pair, windows=_windows(architecture))


def _windows(architecture: Architecture) -> tuple[tuple[int | None, float], ...]:
    """Those of attention, with the share of blocks that have each; none where no block has one."""
    found: Counter[int | None] = Counter()
    for kind in architecture.kinds:
        found.update({layer.window: len(kind.layers) for layer in kind.block.layers() if layer.attends})
    if not any(found):
        return ()
    return tuple((window, count / found.total()) for window, count in found.items())


def flops_per_token(architecture: Architecture, sequence: int) -> int:
    """Training FLOPs of one token of a document of `sequence` positions."""
    work = training_work(architecture)
    return work.position + work.pair * work.pairs(sequence) // sequence


def weight_bytes(inventory: Parameters, number_format: str) -> int:
    """Bytes of all weights in a number format."""
    return BYTES[number_format] * inventory.total


def checkpoint_bytes(inventory: Parameters, params_format: str, moments: int, averages: str | None = None) -> int:
    """Bytes of a full checkpoint over all ranks; see `estimates.SOURCES`. moments: tensors that the optimizer keeps for
    each parameter. averages: their format, if any are kept."""
    averaged = 0 if averages is None else weight_bytes(inventory, averages)
    return (1 + moments) * weight_bytes(inventory, params_format) + averaged


def block_tensors(inventory: Parameters, layer: int) -> list[ParameterSpec]:
    """The parameters of the block of one layer."""
    prefix = f"layers.{layer}."
    return [tensor for tensor in inventory.tensors if tensor.name.startswith(prefix)]
