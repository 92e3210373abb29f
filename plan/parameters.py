"""Parameters of a model: counts and FLOPs, and which are frozen, quantized, in fp8 or adapted."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from fnmatch import fnmatchcase
from functools import lru_cache
from math import prod
from typing import Final

from attrs import evolve, field

from xtrain.dsl.diagnostics.suggest import did_you_mean
from xtrain.dsl.schema.precision import Base, Products
from xtrain.dsl.spec import Spec
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import (
    EMBEDDING,
    HEAD,
    INDEXER,
    SCORE,
    Architecture,
    BlockParameter,
    FamilyBlock,
    LayerKind,
    ParameterSpec,
    block_parameters,
    parameters,
    widest_task,
)
from xtrain.plan.estimates import Parameters, Work
from xtrain.plan.findings import Findings, checks
from xtrain.text.units import BYTES, plural


def count_parameters(
    architecture: Architecture, frozen: Set[str] = frozenset(), quantised: Set[str] = frozenset()
) -> Parameters:
    """Return the inventory. A token uses all parameters except the experts that it is not sent to. frozen: names of
    frozen parameters. quantised: frozen parameters that the base stores."""
    tensors = tuple(
        evolve(each, trained=False, quantised=each.name in quantised) if each.name in frozen else each
        for each in parameters(architecture)
    )
    total = sum(tensor.size for tensor in tensors)
    experts = sum(tensor.size for tensor in tensors if tensor.expert)
    active = total - sum(round(tensor.size * (1 - tensor.multiplied)) for tensor in tensors)
    if architecture.is_moe:
        active -= experts // architecture.experts * (architecture.experts - architecture.experts_per_token)
    return Parameters(total=total, active=active, tensors=tensors)


def matmul_parameters(architecture: Architecture) -> int:
    """Return the number of weights that a token is multiplied with: matrices of blocks and the head, tied or not,
    without lookup, norms and reward head."""
    blocks = sum(len(kind.layers) * block_matmul_parameters(architecture, kind.first) for kind in architecture.kinds)
    return blocks + architecture.head_products + sum(head_factors(architecture))


def head_factors(architecture: Architecture) -> tuple[int, int]:
    """Return the numbers of weights of the head's adapter that multiply the head's input and the result of that
    product; for several tasks, of the widest task. Each module that predicts further tokens counts once more."""
    task, times = widest_task(architecture), 1 + architecture.mtp
    own = [matrix for matrix in architecture.head_matrices if matrix.task == task]
    sizes = [prod(each.shape) * times for matrix in own for each in matrix.parameters(architecture.head_parameter)]
    return (sizes[0], sizes[1]) if sizes else (0, 0)


def block_matmul_parameters(architecture: Architecture, layer: int) -> int:
    """Return the number of weights of one layer's block that a token is multiplied with; routed experts count as often
    as a token is sent to them."""
    return sum(matmul_sizes(architecture, layer).values())


def matmul_sizes(architecture: Architecture, layer: int) -> dict[str, int]:
    """Return matrix name → number of its weights that a token is multiplied with; of the adapters of several tasks,
    only the widest counts."""
    task = widest_task(architecture)
    return {
        tensor.name: tensor.size * architecture.experts_per_token // architecture.experts
        if tensor.expert
        else round(tensor.size * tensor.multiplied)
        for tensor in block_parameters(architecture, layer)
        if len(tensor.shape) > (2 if tensor.expert else 1) and not tensor.begun  # biases of experts are stacked too
        if tensor.task in ("", task)
    }


def largest_product(architecture: Architecture, positions: int) -> int:
    """Return the multiply-adds of the largest product of a block with its matrices, at `positions` tokens.

    Experts are assumed to get equal numbers of tokens.
    """
    routed = positions * architecture.experts_per_token // (architecture.experts or 1)
    return max(
        tensor.size // architecture.experts * routed if tensor.expert else tensor.size * positions
        for kind in architecture.kinds
        for tensor in block_parameters(architecture, kind.first)
        if len(tensor.shape) > (2 if tensor.expert else 1) and tensor.multiplied
    )


def head_product(architecture: Architecture, positions: int) -> int:
    """Return the multiply-adds of the head's product at `positions` tokens."""
    return prod(architecture.head_shape) * positions


@frozen(kw_only=True)
class BackwardLess:
    """FLOPs that backwards save in a model with frozen parts. blocks: layer → FLOPs of products for a token. head:
    FLOPs of the head. mixing: layers in which what mixes positions has no backward."""

    blocks: Mapping[int, int] = field(factory=dict)
    head: int = 0
    mixing: frozenset[int] = frozenset()


def training_work(architecture: Architecture, less: BackwardLess) -> Work:
    """Return the FLOPs without recomputation (2 per weight in the forward, 4 in the backward where needed); see
    `estimates.SOURCES`."""
    position = 6 * matmul_parameters(architecture) - sum(less.blocks.values()) - less.head
    position += sum(
        (1 if layer in less.mixing else 3) * mixer.position_flops(architecture)
        for kind in architecture.kinds
        for mixer in kind.block.layers()
        for layer in kind.layers
    )
    pair = sum(
        (1 if layer in less.mixing else 3) * mixer.pair_flops(architecture)
        for kind in architecture.kinds
        for mixer in kind.block.layers()
        for layer in kind.layers
    )
    return Work(position=position, pair=pair, windows=_windows(architecture, less.mixing))


def _windows(architecture: Architecture, forward_only: Set[int]) -> tuple[tuple[int | None, float], ...]:
    """Return (window, share of attention FLOPs) for each attention window; empty if no block has one."""
    found: Counter[int | None] = Counter()
    for kind in architecture.kinds:
        work = sum(4 if layer in forward_only else 12 for layer in kind.layers)
        found.update({layer.window: work for layer in kind.block.layers() if layer.attends})
    if not any(found):
        return ()
    return tuple((window, count / found.total()) for window, count in found.items())


def flops_per_token(architecture: Architecture, sequence: int, less: BackwardLess | None = None) -> int:
    """Return the training FLOPs of one token of a document of `sequence` positions."""
    work = training_work(architecture, less or BackwardLess())
    return work.position + work.pair * work.pairs(sequence) // sequence


def forward_flops(architecture: Architecture, sequence: int) -> float:
    """Return the forward part of these FLOPs; the backward of a fully trained model takes twice as many."""
    return flops_per_token(architecture, sequence) / 3


def weight_bytes(inventory: Parameters, number_format: str, frozen: str = "", base: Base | None = None) -> int:
    """Return the bytes of all weights in a number format. frozen: format of frozen weights, if different. base: storage
    of quantized weights; None: like the others."""
    trained = inventory.trained
    found = BYTES[number_format] * trained + BYTES[frozen or number_format] * (inventory.total - trained)
    for each in inventory.tensors:
        if each.quantised and base is not None:
            found += quantised_bytes(base, each.shape) - BYTES[frozen or number_format] * each.size
    return found


def quantised_bytes(base: Base, shape: tuple[int, ...]) -> int:
    """Return the bytes of a whole matrix, or stack, that a base stores."""
    return prod(base.stored_shape(shape)) + beside_bytes(base, shape)


def beside_bytes(base: Base, shape: tuple[int, ...]) -> int:
    """Return the part of these bytes that every rank holds whole: the scales."""
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
    """Return the bytes of a full checkpoint over all ranks; see `estimates.SOURCES`. frozen: format of frozen
    parameters. moments: bytes of optimizer state. averages: format of averaged weights, if any."""
    averaged = 0 if averages is None else weight_bytes(inventory, averages, frozen, base)
    return weight_bytes(inventory, params_format, frozen, base) + moments + averaged


def block_tensors(inventory: Parameters, layer: int) -> list[ParameterSpec]:
    """Return the parameters of the block of one layer."""
    return inventory.of_blocks.get(layer, [])


PATH: Final = "model.frozen"
ANY_PARTS: Final = "**"
_RANGE: Final = re.compile(r"(\d+)-(\d+)")
_PLAIN: Final = re.compile(r"\w+")


@lru_cache(maxsize=1 << 16)  # called for every parameter wherever bytes are counted
def covers(pattern: str, name: str) -> bool:
    """Return True if a pattern matches a parameter or a module around it. Dotted names match part by part: `*` is any
    text inside a part, `0-3` the numbers 0 to 3, and `**` any parts."""
    return _covers(pattern.split("."), name.split("."))


def _covers(wanted: Sequence[str], parts: Sequence[str]) -> bool:
    if ANY_PARTS in wanted:
        at = wanted.index(ANY_PARTS)
        before, behind = wanted[:at], wanted[at + 1 :]
        return _covers(before, parts[:at]) and any(_covers(behind, parts[start:]) for start in range(at, len(parts)))
    return len(wanted) <= len(parts) and all(map(fits_part, wanted, parts))


def fits_part(wanted: str, part: str) -> bool:
    if found := _RANGE.fullmatch(wanted):
        return part.isdecimal() and int(found[1]) <= int(part) <= int(found[2])
    return fnmatchcase(part, wanted)


class Patterns:
    """Patterns as in `covers`, looked up by the parameters that they match: those without wildcards by the parts of a
    name."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._order = {pattern: place for place, pattern in enumerate(dict.fromkeys(patterns))}
        self._wild = [pattern for pattern in self._order if not all(map(_PLAIN.fullmatch, pattern.split(".")))]
        self._of: dict[str, list[str]] = {}

    def of(self, name: str) -> list[str]:
        """Return the patterns that match a parameter, in their order."""
        if name not in self._of:
            self._of[name] = self._matching(name)
        return self._of[name]

    def _matching(self, name: str) -> list[str]:
        parts = name.split(".")
        around = (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))
        plain = [pattern for pattern in around if pattern in self._order]
        wild = [pattern for pattern in self._wild if covers(pattern, name)]
        return sorted((*plain, *wild), key=self._order.__getitem__) if wild or len(plain) > 1 else plain

    def matches(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return pattern → the names that it matches, in their order."""
        found: dict[str, list[str]] = {pattern: [] for pattern in self._order}
        for name in names:
            for pattern in self.of(name):
                found[pattern].append(name)
        return found


def blocks_beyond(pattern: str, arch: Architecture) -> tuple[str, str] | None:
    """Return (error, remedy) for a pattern whose range of blocks extends past the model's last block; otherwise
    None."""
    for part in pattern.split("."):
        found = _RANGE.fullmatch(part)
        if found is not None and int(found[1]) < arch.layers <= int(found[2]):
            last = arch.layers - 1
            there = f"{found[1]}-{last}" if int(found[1]) < last else f"{last}"
            return f"`{pattern}` goes beyond the model, whose blocks are 0 to {last}", f"write `{there}`"
    return None


def frozen_names(arch: Architecture, patterns: Sequence[str]) -> frozenset[str]:
    """Return the parameters that are not trained: parameters that patterns match, and parameters that no loss has a
    gradient of. With an adapter: the whole model, except a reward head and the parts that `train` of the adapter names,
    and the adapter's stored initial values."""
    idle = _idle_names(arch)
    if (adapter := arch.adapter) is not None:
        trained = (*adapter.train, *((SCORE,) if not arch.has_logits else ()))
        own = (tensor.name for tensor in parameters(arch) if not tensor.adapter)
        kept = Patterns(trained)
        model = (name for name in own if not kept.of(name))
        return idle.union(model, (tensor.name for tensor in parameters(arch) if tensor.begun))
    if not patterns:
        return idle
    fixed = Patterns(patterns)
    return idle.union(tensor.name for tensor in parameters(arch) if fixed.of(tensor.name))


def _idle_names(arch: Architecture) -> frozenset[str]:
    """Return the parameters that no loss has a gradient of: indexers, and idle ones of transformers' code."""
    code = arch.own.get("code")
    if code is None:
        return frozenset(tensor.name for tensor in parameters(arch) if not tensor.trained)
    of_layers = (
        f"layers.{layer}.{each['name']}"
        for kind in code["kinds"]
        for each in kind["parameters"]
        if each.get("idle")
        for layer in kind["layers"]
    )
    return frozenset((*of_layers, *(each["name"] for each in code["ends"] if each.get("idle"))))


@checks("model.indexers", reads="model.* adapter.* tokenizer.source")
def check_indexers(spec: Spec, arch: Architecture, found: Findings) -> None:
    """Check that a loss of indexers has indexers to train."""
    if not arch.learning_indexers:
        return
    names = {tensor.name for tensor in parameters(arch) if INDEXER in tensor.name}
    if names <= frozen_names(arch, spec.model.frozen):
        message = "every indexer is frozen, so its loss changes nothing"
        hint = "leave indexers out of `frozen`, or use index_loss 0"
        if arch.adapter is not None:
            hint = 'use index_loss 0, or write `train = ["layers.*.self_attn.indexer"]` in the adapter'
        found.fail("model.indexers", "X434", "model.index_loss", message, hint)
    else:
        found.passed("model.indexers", f"{plural(arch.learning_indexers, 'indexer')} learn from their own loss")


def check_frozen(spec: Spec, arch: Architecture, found: Findings) -> None:
    """Check that every pattern matches a parameter that no earlier pattern matches, and that some parameters are left
    to train."""
    patterns = spec.model.frozen
    if not patterns or arch.adapter is not None:
        return
    names, frozen = [tensor.name for tensor in parameters(arch)], set[str]()
    idle: tuple[str, str] | None = None
    beyond: tuple[str, str, str] | None = None
    matches = Patterns(patterns).matches(names)
    for number, pattern in enumerate(patterns):
        meant, path = set(matches[pattern]), f"{PATH}.{number}"
        if not meant:
            message = f"no parameter of the model is in `{pattern}`"
            found.fail(PATH, "X434", path, message, instead(pattern, names, arch))
            return
        idle = idle or ((path, pattern) if meant <= frozen else None)
        if beyond is None and (wrong := blocks_beyond(pattern, arch)) is not None:
            beyond = (path, *wrong)
        frozen |= meant
    if len(frozen) == len(names):
        message = "every parameter is frozen, so there is nothing to train"
        found.fail(PATH, "X434", PATH, message, "remove a part of the model from frozen")
    elif idle is not None:
        path, pattern = idle
        message = f"`{pattern}` freezes nothing beyond the patterns before it"
        found.warn(PATH, "W401", path, message, f"remove `{pattern}`")
    elif beyond is not None:
        path, message, hint = beyond
        found.warn(PATH, "W401", path, message, hint)
    else:
        found.passed(PATH, f"{len(frozen):,} of {len(names):,} tensors are frozen")


def instead(pattern: str, names: Iterable[str], arch: Architecture) -> str:
    """Return a replacement for a pattern that matches nothing."""
    if pattern.partition(".")[0] == HEAD and arch.tie_embeddings:
        return f"the head is the embedding: write `{EMBEDDING}`, or use tie_embeddings false"
    parts = pattern.split(".")
    if ANY_PARTS in parts:
        every = list(dict.fromkeys(part for name in names for part in name.split(".")))
        near = (did_you_mean(part, every) for part in parts if not any(fits_part(part, each) for each in every))
        return next(near, None) or "name modules or parameters as the plan does"
    for depth, part in enumerate(parts):
        inside = [name for name in names if covers(".".join([*parts[:depth], "*"]), name)]
        there = list(dict.fromkeys(name.split(".")[depth] for name in inside))
        if any(fits_part(part, each) for each in there):
            continue
        if there and all(each.isdecimal() for each in there):
            return f"the blocks are 0 to {arch.layers - 1}"
        before = ".".join(parts[:depth])
        where = f"in `{before}` there are" if before else "the model has"
        return did_you_mean(part, there) or f"{where} {', '.join(there)}" if there else f"`{before}` is a parameter"
    return "name modules or parameters as the plan does"


ALL_LINEAR: Final = "all_linear"


def matrices_of(block: FamilyBlock, arch: Architecture) -> Iterator[BlockParameter]:
    """Yield the matrices of a block that can have an adapter; routers cannot."""
    for layer in block.layers():
        if layer.adapts:
            yield from (each for each in layer.parameters(arch) if each.is_matrix and each.linear and not each.router)


def all_matrices(arch: Architecture) -> list[tuple[int | None, BlockParameter]]:
    """Return (layer, matrix) for every matrix of a model that can have an adapter, in model order; the layer of the
    head is None."""
    found = {layer: tuple(matrices_of(kind.block, arch)) for kind in arch.base.kinds for layer in kind.layers}
    of_blocks = [(layer, matrix) for layer in sorted(found) for matrix in found[layer]]
    return [*of_blocks, *([(None, arch.head_parameter)] if arch.has_logits else [])]


def name_of(layer: int | None, name: str) -> str:
    """Return the model's name of a block's parameter; layer None: the name is unchanged."""
    return name if layer is None else f"layers.{layer}.{name}"


def is_target(pattern: str, layer: int | None, matrix: BlockParameter) -> bool:
    """Return True if a pattern matches a matrix of the block of a layer. Only patterns that name their module match
    routed experts, and only the head's name matches the head."""
    if layer is None:
        return pattern == HEAD
    if matrix.expert and matrix.owner.rpartition(".")[2] not in pattern.split("."):
        return False
    return pattern == ALL_LINEAR or means(pattern, layer, matrix.name)


def means(pattern: str, layer: int | None, name: str) -> bool:
    """Return True if a pattern equals consecutive parts of a parameter's name, with `*` and `0-3` as in `covers`.
    layer: of the block that it is in; None: outside blocks."""
    place = [] if layer is None else ["layers", str(layer)]
    wanted, parts = pattern.split("."), [*place, *name.removesuffix(".weight").split(".")]
    return any(all(map(fits_part, wanted, parts[start:])) for start in range(len(parts) - len(wanted) + 1))


def targets_of(arch: Architecture, names: Set[str]) -> tuple[str, ...]:
    """Return patterns that match exactly these matrices. names: of parameters."""
    dense = {name_of(layer, each.name) for layer, each in all_matrices(arch) if layer is not None and not each.expert}
    if dense and dense <= names:
        return ALL_LINEAR, *patterns_of(arch, names - dense)
    return patterns_of(arch, names)


def patterns_of(arch: Architecture, names: Set[str]) -> tuple[str, ...]:
    """Return patterns that match exactly these matrices, each by its own name."""
    layers: dict[str, list[int]] = {}
    every: dict[str, list[int]] = {}
    for layer, matrix in all_matrices(arch):
        if layer is not None:
            every.setdefault(matrix.name, []).append(layer)
            if name_of(layer, matrix.name) in names:
                layers.setdefault(matrix.name, []).append(layer)
    found: list[str] = []
    for name, own in layers.items():
        matrix = name.removesuffix(".weight")
        found += [matrix] if own == every[name] else [f"layers.{each}.{matrix}" for each in _ranges(own)]
    if f"{HEAD}.weight" in names:
        found.append(HEAD)
    return tuple(found)


def _ranges(numbers: Sequence[int]) -> Iterator[str]:
    """Yield ranges of sorted numbers: `0-3`, `7`."""
    first = last = numbers[0]
    for number in (*numbers[1:], numbers[-1] + 2):
        if number != last + 1:
            yield f"{first}-{last}" if last > first else str(first)
            first = number
        last = number


def quantised_names(arch: Architecture, base: Base, frozen: Set[str]) -> frozenset[str]:
    """Return the parameters that a base stores: frozen matrices of products in blocks, without routers."""
    if not base.stores:
        return frozenset()
    names = (
        f"layers.{layer}.{each.name}"
        for kind in arch.kinds
        for each in product_matrices(arch, kind)
        for layer in kind.layers
    )
    return frozenset(name for name in names if name in frozen)


def product_matrices(arch: Architecture, kind: LayerKind) -> Iterator[BlockParameter]:
    """Yield the matrices of products in the block of one kind of layers, trained or not."""
    for layer in kind.block.layers():
        for each in layer.parameters(arch) if layer.adapts else ():
            if len(each.shape) == (3 if each.expert else 2) and each.linear and not each.router:
                yield each


Layers = dict[str, tuple[int, ...]]
"""Name of a module inside a block → the layers that have it."""


def scaled_matrices(arch: Architecture, tp: int, products: Products) -> Layers:
    """Return the matrices that are multiplied in fp8, or rounded, in model order."""
    found: dict[str, list[int]] = {}
    for layer, matrix in _all(arch):
        if not matrix.expert and not is_skipped(products, layer, matrix) and not _unfit(matrix, tp, products):
            found.setdefault(matrix.owner, []).append(layer)
    return {name: tuple(layers) for name, layers in found.items()}


def unfit_matrices(arch: Architecture, tp: int, products: Products) -> dict[str, int]:
    """Return name in the block → width, for matrices whose width kernels do not support, or groups do not divide."""
    return {
        matrix.owner: width
        for layer, matrix in _all(arch)
        if not matrix.expert and not is_skipped(products, layer, matrix) and (width := _unfit(matrix, tp, products))
    }


def idle_patterns(arch: Architecture, products: Products) -> list[str]:
    """Return patterns of `skip` that match no matrix."""
    every = [(layer, matrix) for layer, matrix in _all(arch) if not matrix.expert]
    return [each for each in products.skip if not any(means(each, layer, matrix.name) for layer, matrix in every)]


def is_skipped(products: Products, layer: int, matrix: BlockParameter) -> bool:
    return any(means(pattern, layer, matrix.name) for pattern in products.skip)


def matrix_numbers(arch: Architecture, matrices: Layers) -> int:
    """Return the total number of weights of these matrices."""
    sizes = {(layer, each.owner): prod(each.shape) for layer, each in _all(arch)}
    return sum(sizes[layer, name] for name, layers in matrices.items() for layer in layers)


def _all(arch: Architecture) -> Iterator[tuple[int, BlockParameter]]:
    found = {layer: tuple(matrices_of(kind.block, arch)) for kind in arch.kinds for layer in kind.layers}
    return ((layer, matrix) for layer in sorted(found) for matrix in found[layer] if not matrix.adapter)


def _unfit(matrix: BlockParameter, tp: int, products: Products) -> int:
    """Return a matrix's width on a rank that does not fit; 0 if both do."""
    outputs, inputs = matrix.shape
    outputs, inputs = (
        (outputs // tp if matrix.cut == "column" else outputs),
        (inputs // tp if matrix.cut == "row" else inputs),
    )
    return products.unfit(outputs, inputs)
