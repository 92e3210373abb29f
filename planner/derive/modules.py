"""Modules of a model with their numbers of parameters: trained, frozen and adapted."""

from collections import Counter
from collections.abc import Iterator, Mapping, Set

from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import ParameterSpec, name_in_block
from xtrain.plan.estimates import Parameters


@frozen
class ModuleCount:
    """Module (one name may stand for several neighboring layers), or a single parameter, with its number of
    elements."""

    name: str
    parameters: int


def modules_of(inventory: Parameters, *, trained: bool) -> tuple[ModuleCount, ...]:
    """Return the trained modules of the model, or the frozen ones, in model order, without adapters."""
    return _modules_of([tensor for tensor in inventory.tensors if not tensor.adapter], trained=trained)


def adapters_of(inventory: Parameters) -> tuple[ModuleCount, ...]:
    """Return the adapted matrices, each with the size of its adapter."""
    sizes: Counter[str] = Counter()
    for tensor in inventory.tensors:
        if tensor.adapter and not tensor.begun:
            sizes[tensor.adapter.removesuffix(".weight")] += tensor.size
    layers: dict[int, tuple[ModuleCount, ...]] = {}
    behind: list[ModuleCount] = []
    for name, size in sizes.items():
        if inside := name_in_block(name):
            layer = int(name.split(".")[1])
            layers[layer] = (*layers.get(layer, ()), ModuleCount(inside, size))
        else:
            behind.append(ModuleCount(name, size))
    return (*_of_neighbours(layers), *behind)


def _modules_of(tensors: list[ParameterSpec], *, trained: bool) -> tuple[ModuleCount, ...]:
    ends: list[ParameterSpec] = []
    layers: dict[int, list[ParameterSpec]] = {}
    for tensor in tensors:
        inside = layers.setdefault(int(tensor.name.split(".")[1]), []) if name_in_block(tensor.name) else ends
        inside.append(tensor)
    found: list[ModuleCount] = []
    before = next((place for place, tensor in enumerate(tensors) if name_in_block(tensor.name)), len(ends))
    found += _whole(ends[:before], trained=trained)
    found += _of_neighbours({layer: tuple(_in_block(own, trained=trained)) for layer, own in layers.items()})
    return tuple(found + _whole(ends[before:], trained=trained))


def _of_neighbours(layers: Mapping[int, tuple[ModuleCount, ...]]) -> Iterator[ModuleCount]:
    """Yield modules inside blocks; equal modules of neighboring layers are merged."""
    runs: list[tuple[int, int, tuple[ModuleCount, ...]]] = []
    for layer, own in layers.items():
        if runs and runs[-1][1] == layer - 1 and runs[-1][2] == own:
            runs[-1] = (runs[-1][0], layer, own)
        else:
            runs.append((layer, layer, own))
    for first, last, modules in runs:
        block = f"layers.{first}" if first == last else f"layers.{first}-{last}"
        for each in modules:
            yield ModuleCount(f"{block}.{each.name}".rstrip("."), (last - first + 1) * each.parameters)


def _whole(tensors: list[ParameterSpec], *, trained: bool) -> list[ModuleCount]:
    return [ModuleCount(each.name.rpartition(".")[0], each.size) for each in tensors if each.trained == trained]


def _in_block(tensors: list[ParameterSpec], *, trained: bool) -> Iterator[ModuleCount]:
    sizes = {name_in_block(tensor.name): tensor.size for tensor in tensors}
    meant = {name_in_block(tensor.name) for tensor in tensors if tensor.trained == trained}
    yield from _modules("", sizes, meant)


def _modules(module: str, sizes: Mapping[str, int], meant: Set[str]) -> Iterator[ModuleCount]:
    """Yield the largest modules inside `module` with all parameters in `meant`. Empty `module`: the block."""
    inside = [name for name in sizes if not module or name == module or name.startswith(f"{module}.")]
    if all(name in meant for name in inside):
        yield ModuleCount(module, sum(sizes[name] for name in inside))
    elif any(name in meant for name in inside):
        depth = module.count(".") + 1 if module else 0
        for child in dict.fromkeys(".".join(name.split(".")[: depth + 1]) for name in inside):
            yield from _modules(child, sizes, meant)
