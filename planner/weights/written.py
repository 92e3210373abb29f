"""How the weights of a model are laid out in the files of a folder: which tensors, in which formats, in which file."""

from collections.abc import Callable, Iterable, Iterator
from math import prod

from attrs import evolve, frozen

from xtrain.dsl.schema.model import FAMILIES
from xtrain.planner.architecture import Architecture, ParameterSpec, buffers, parameters
from xtrain.planner.weights.files import SINGLE, SIZES, header_of
from xtrain.planner.weights.stored import StoredPart


@frozen
class WrittenTensor:
    """A tensor of a file: a parameter, one expert of it, or several parameters of one number format. parts: parameter →
    what of it is in the tensor. format: as safetensors calls it."""

    parts: tuple[tuple[str, StoredPart], ...]
    format: str

    @property
    def name(self) -> str:
        return self.parts[0][1].name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.parts[0][1].shape

    @property
    def bytes(self) -> int:
        return prod(self.shape) * SIZES[self.format]


@frozen
class WrittenFile:
    """tensors: in the order in which their data lie in it."""

    name: str
    tensors: tuple[WrittenTensor, ...]

    @property
    def header(self) -> bytes:
        return header_of((tensor.name, tensor.format, tensor.shape) for tensor in self.tensors)

    @property
    def bytes(self) -> int:
        """Of its data."""
        return sum(tensor.bytes for tensor in self.tensors)


# The format of the n-th tensor that a parameter is written as.
FormatOf = Callable[[ParameterSpec, int], str]


def lay_out(arch: Architecture, format_of: FormatOf, most: int) -> tuple[WrittenFile, ...]:
    """The files of a model, the tensors in the order of its parameters, with at most so many bytes in each; a larger
    tensor has a file of its own."""
    return in_files(_tensors(arch, format_of), most)


def in_files(tensors: Iterable[WrittenTensor], most: int) -> tuple[WrittenFile, ...]:
    """The same of any tensors, in this order."""
    groups: list[list[WrittenTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.bytes > most:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.bytes
    count = len(groups)
    stem, _, ending = SINGLE.rpartition(".")
    names = [SINGLE] if count == 1 else [f"{stem}-{n:05d}-of-{count:05d}.{ending}" for n in range(1, count + 1)]
    # Wider numbers come first, so that each lies at a multiple of its size.
    ordered = (sorted(group, key=lambda tensor: -SIZES[tensor.format]) for group in groups)
    return tuple(WrittenFile(name, tuple(group)) for name, group in zip(names, ordered, strict=True))


def _tensors(arch: Architecture, format_of: FormatOf) -> Iterator[WrittenTensor]:
    """In the order in which their first parameters are."""
    names = FAMILIES[arch.family].stored
    parts: dict[str, list[tuple[str, StoredPart]]] = {}
    formats: dict[str, str] = {}
    arch = names.stored_part(arch)
    copied: dict[str, list[str]] = {}
    for name, parameter in names.copies(arch):
        copied.setdefault(parameter, []).append(name)
    for parameter in (*parameters(arch), *buffers(arch)):
        for number, part in enumerate(names.of(parameter)[0]):
            parts.setdefault(part.name, []).append((parameter.name, part))
            formats[part.name] = format_of(parameter, number)
            for name in copied.get(parameter.name, ()):
                parts[name] = [(parameter.name, evolve(part, name=name))]
                formats[name] = formats[part.name]
    for name, each in parts.items():
        yield WrittenTensor(tuple(each), formats[name])
