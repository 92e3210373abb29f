"""What a model is made of, counted: parameters, weights that a token is multiplied with, floating-point operations."""

from collections import Counter
from collections.abc import Mapping, Set
from math import prod

from attrs import evolve, field, frozen

from xtrain.dsl.schema.bases import Base
from xtrain.planner.architecture import Architecture, ParameterSpec, block_parameters, parameters, widest_task
from xtrain.planner.plan import Parameters, Work
from xtrain.planner.units import BYTES


def count_parameters(
    architecture: Architecture, frozen: Set[str] = frozenset(), quantised: Set[str] = frozenset()
) -> Parameters:
    """The inventory. A token uses all parameters but the experts it is not sent to. frozen: names of parameters that
    are not trained. quantised: of those among them that the base stores."""
    tensors = tuple(
        evolve(each, trained=False, quantised=each.name in quantised) if each.name in frozen else each
        for each in parameters(architecture)
    )
    total = sum(tensor.size for tensor in tensors)
    experts = sum(tensor.size for tensor in tensors if tensor.expert)
    active = total
    if architecture.is_moe:
        active -= experts // architecture.experts * (architecture.experts - architecture.experts_per_token)
    return Parameters(total=total, active=active, tensors=tensors)


def matmul_parameters(architecture: Architecture) -> int:
    """Weights a token is multiplied with: matrices of blocks and the head, tied or not; no lookup, no norms, and no
    head of rewards."""
    blocks = sum(len(kind.layers) * block_matmul_parameters(architecture, kind.first) for kind in architecture.kinds)
    return blocks + architecture.head_products + sum(head_factors(architecture))


def head_factors(architecture: Architecture) -> tuple[int, int]:
    """Weights of what an adapter has beside the head: those that what the head reads is multiplied with, and those
    that the product is; of several tasks, of the widest one. Once more for each module that predicts further tokens."""
    task, times = widest_task(architecture), 1 + architecture.mtp
    own = [matrix for matrix in architecture.head_matrices if matrix.task == task]
    sizes = [prod(each.shape) * times for matrix in own for each in matrix.parameters(architecture.head_parameter)]
    return (sizes[0], sizes[1]) if sizes else (0, 0)


def block_matmul_parameters(architecture: Architecture, layer: int) -> int:
    """Those of the block of one layer; of the routed experts, as many as a token is sent to."""
    return sum(matmul_sizes(architecture, layer).values())


def matmul_sizes(architecture: Architecture, layer: int) -> dict[str, int]:
    """The same by the name of the matrix; of the adapters of several tasks, those of the widest one."""
    task = widest_task(architecture)
    return {
        tensor.name: tensor.size * architecture.experts_per_token // architecture.experts
        if tensor.expert
        else tensor.size
        for tensor in block_parameters(architecture, layer)
        if len(tensor.shape) > (2 if tensor.expert else 1) and not tensor.begun  # biases of experts are stacked too
        if tensor.task in ("", task)
    }


def largest_product(architecture: Architecture, positions: int) -> int:
    """Return the multiply-adds of the largest product of a block with its matrices, at `positions` tokens.

    An expert multiplies the tokens that it gets if all experts get as many."""
    routed = positions * architecture.experts_per_token // (architecture.experts or 1)
    return max(
        tensor.size // architecture.experts * routed if tensor.expert else tensor.size * positions
        for kind in architecture.kinds
        for tensor in block_parameters(architecture, kind.first)
        if len(tensor.shape) > (2 if tensor.expert else 1)
    )


@frozen(kw_only=True)
class BackwardLess:
    """What backwards do without where a part of the model is not trained. blocks: layer → operations of products for a
    token. head: the same of the head. attention: layers whose attention has no backward."""

    blocks: Mapping[int, int] = field(factory=dict)
    head: int = 0
    attention: frozenset[int] = frozenset()


def training_work(architecture: Architecture, less: BackwardLess) -> Work:
    """Operations without recomputation (forward 2, backward 4 a weight, as far as it is needed); see
    `estimates.SOURCES`."""
    position = 6 * matmul_parameters(architecture) - sum(less.blocks.values()) - less.head
    pair = sum(
        (1 if layer in less.attention else 3) * attention.pair_flops(architecture)
        for kind in architecture.kinds
        for attention in kind.block.layers()
        if attention.attends
        for layer in kind.layers
    )
    return Work(position=position, pair=pair, windows=_windows(architecture, less.attention))


def _windows(architecture: Architecture, forward_only: Set[int]) -> tuple[tuple[int | None, float], ...]:
    """Those of attention, with the share of its operations that have each; none where no block has one."""
    found: Counter[int | None] = Counter()
    for kind in architecture.kinds:
        work = sum(4 if layer in forward_only else 12 for layer in kind.layers)
        found.update({layer.window: work for layer in kind.block.layers() if layer.attends})
    if not any(found):
        return ()
    return tuple((window, count / found.total()) for window, count in found.items())


def flops_per_token(architecture: Architecture, sequence: int, less: BackwardLess | None = None) -> int:
    """Training FLOPs of one token of a document of `sequence` positions."""
    work = training_work(architecture, less or BackwardLess())
    return work.position + work.pair * work.pairs(sequence) // sequence


def forward_flops(architecture: Architecture, sequence: int) -> float:
    """Of them those of the forward; the backward of a model that is trained whole computes twice as many."""
    return flops_per_token(architecture, sequence) / 3


def weight_bytes(inventory: Parameters, number_format: str, frozen: str = "", base: Base | None = None) -> int:
    """Bytes of all weights in a number format. frozen: that of those that are not trained, if it is another. base: how
    quantised ones are stored; None: like the others."""
    trained = inventory.trained
    found = BYTES[number_format] * trained + BYTES[frozen or number_format] * (inventory.total - trained)
    for each in inventory.tensors:
        if each.quantised and base is not None:
            found += quantised_bytes(base, each.shape) - BYTES[frozen or number_format] * each.size
    return found


def quantised_bytes(base: Base, shape: tuple[int, ...]) -> int:
    """Bytes of all of a matrix, or a stack, that a base stores."""
    return prod(base.stored_shape(shape)) + beside_bytes(base, shape)


def beside_bytes(base: Base, shape: tuple[int, ...]) -> int:
    """Of these the ones that every rank has whole."""
    shape = base.scales_shape(shape)
    return BYTES["fp32"] * prod(shape) if shape else 0


def checkpoint_bytes(
    inventory: Parameters,
    params_format: str,
    frozen: str,
    moments: int,
    averages: str | None = None,
    base: Base | None = None,
) -> int:
    """Bytes of a full checkpoint over all ranks; see `estimates.SOURCES`. frozen: the format of parameters that are not
    trained. moments: bytes of what the optimizer keeps of the others. averages: their format, if any are kept."""
    averaged = 0 if averages is None else weight_bytes(inventory, averages, frozen, base)
    return weight_bytes(inventory, params_format, frozen, base) + moments + averaged


def block_tensors(inventory: Parameters, layer: int) -> list[ParameterSpec]:
    """The parameters of the block of one layer."""
    prefix = f"layers.{layer}."
    return [tensor for tensor in inventory.tensors if tensor.name.startswith(prefix)]
