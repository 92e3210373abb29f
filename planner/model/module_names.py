"""Parameters as people name them together: by the modules that they are all of, `layers.0-3.self_attn`."""

from collections.abc import Iterator, Mapping, Set

from attrs import frozen

from ..architecture import ParameterSpec, name_in_block
from ..plan import Parameters


@frozen
class ModuleCount:
    """A module, that of several neighbouring layers, or a parameter by itself; and how many numbers it has."""

    name: str
    parameters: int


def modules_of(inventory: Parameters, *, trained: bool) -> tuple[ModuleCount, ...]:
    """The parameters that are trained, or those that are not, in the order of the model."""
    ends: list[ParameterSpec] = []
    layers: dict[int, list[ParameterSpec]] = {}
    for tensor in inventory.tensors:
        inside = layers.setdefault(int(tensor.name.split(".")[1]), []) if name_in_block(tensor.name) else ends
        inside.append(tensor)
    found: list[ModuleCount] = []
    before = next((place for place, tensor in enumerate(inventory.tensors) if name_in_block(tensor.name)), len(ends))
    found += _whole(ends[:before], trained=trained)
    runs: list[tuple[int, int, tuple[ModuleCount, ...]]] = []
    for layer, tensors in layers.items():
        own = tuple(_in_block(layer, tensors, trained=trained))
        if runs and runs[-1][1] == layer - 1 and runs[-1][2] == own:
            runs[-1] = (runs[-1][0], layer, own)
        else:
            runs.append((layer, layer, own))
    for first, last, modules in runs:
        block = f"layers.{first}" if first == last else f"layers.{first}-{last}"
        found += [
            ModuleCount(f"{block}.{each.name}".rstrip("."), (last - first + 1) * each.parameters) for each in modules
        ]
    return tuple(found + _whole(ends[before:], trained=trained))


def _whole(tensors: list[ParameterSpec], *, trained: bool) -> list[ModuleCount]:
    return [ModuleCount(each.name.rpartition(".")[0], each.size) for each in tensors if each.trained == trained]


def _in_block(layer: int, tensors: list[ParameterSpec], *, trained: bool) -> Iterator[ModuleCount]:
    sizes = {name_in_block(tensor.name): tensor.size for tensor in tensors}
    meant = {name_in_block(tensor.name) for tensor in tensors if tensor.trained == trained}
    yield from _modules("", sizes, meant)


def _modules(module: str, sizes: Mapping[str, int], meant: Set[str]) -> Iterator[ModuleCount]:
    """The largest modules inside `module` all of whose parameters are meant; empty: the block."""
    inside = [name for name in sizes if not module or name == module or name.startswith(f"{module}.")]
    if all(name in meant for name in inside):
        yield ModuleCount(module, sum(sizes[name] for name in inside))
    elif any(name in meant for name in inside):
        depth = module.count(".") + 1 if module else 0
        for child in dict.fromkeys(".".join(name.split(".")[: depth + 1]) for name in inside):
            yield from _modules(child, sizes, meant)
