"""Weights of model folders of transformers: parameters assigned to stored tensors, and files to write."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any, Final, Literal

from attrs import evolve

from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import HEAD, Architecture, ParameterSpec, buffers, parameters
from xtrain.plan.hardware import FP8
from xtrain.plan.weight_files import (
    EMBEDDING_WEIGHT,
    HEAD_WEIGHT,
    LOADED,
    SCORE_WEIGHT,
    SINGLE,
    SIZES,
    StoredPart,
    StoredTensor,
    WeightFiles,
    header_of,
    stored_names,
)

FP8_BLOCK: Final = 128  # rows and columns of a block, as published by DeepSeek and Qwen


def has_rewards(arch: Architecture, files: WeightFiles) -> bool:
    """Return True if the folder has a reward head."""
    return SCORE_WEIGHT in stored_names(arch).own_names(files.tensors)


def draws_head(arch: Architecture, files: WeightFiles) -> bool:
    """Return True if the model has a reward head and its folder (of a language model) does not."""
    return not arch.has_logits and not has_rewards(arch, files)


@frozen
class Assignment:
    """Sources of a model's parameters. parts: parameter or buffer → the parts of stored tensors that it is read from,
    without a reward head that the folder lacks. twin: the stored head of a tied model, which must equal the
    embedding; empty if there is none."""

    parts: dict[str, tuple[StoredPart, ...]]
    twin: str = ""


def stored_rows(arch: Architecture, files: WeightFiles) -> int:
    """Return how many rows of a model's embedding a folder has; all of them if it has no embedding."""
    names = stored_names(arch)
    embedding = ParameterSpec(name=EMBEDDING_WEIGHT, shape=(arch.vocab, arch.dim), decays=False)
    ((part,), *_) = names.of(embedding)
    stored = files.tensors.get(names.own_names(files.tensors).get(part.name, ""))
    return min(arch.vocab, stored.shape[0]) if stored is not None and stored.shape else arch.vocab


def assign(arch: Architecture, files: WeightFiles, *, grows: bool = False) -> Assignment:
    """Return the source of every parameter that files of the family have. Raises ValueError, whose text names the
    fault, if the folder does not fit.

    grows: the model's embedding and head may have more rows than the files.
    """
    names = stored_names(arch)
    arch = names.stored_part(arch)
    arch = evolve(arch, vocab=stored_rows(arch, files)) if grows else arch
    own = names.own_names(files.tensors)
    found: dict[str, tuple[StoredPart, ...]] = {}
    missing: list[str] = []
    for parameter in (*parameters(arch.base), *(each for each in buffers(arch) if each.name.endswith(names.buffers))):
        ways = names.of(parameter)
        chosen = next((parts for parts in ways if all(part.name in own for part in parts)), None)
        if chosen is None and parameter.name == SCORE_WEIGHT:
            continue
        if chosen is None:  # a tensor with several parts is listed once
            missing += [part.name for part in ways[0] if part.name not in own and part.name not in missing]
        else:
            found[parameter.name] = tuple(_as_stored(part, own) for part in chosen)
    used = {part.name: part.shape for parts in found.values() for part in parts}
    twin = own.get(HEAD_WEIGHT, "") if arch.tie_embeddings else ""
    if twin and EMBEDDING_WEIGHT in found:
        used[twin] = found[EMBEDDING_WEIGHT][0].shape
    unused = {own[HEAD_WEIGHT]} if not arch.has_logits and HEAD_WEIGHT in own else set[str]()
    surplus = [
        name
        for name in files.tensors
        if name not in used and name not in unused and not names.is_ignored(name, arch, files.tensors)
    ]
    if problems := wrong_tensors(files, used, missing, surplus):
        raise ValueError("; ".join(problems))
    return Assignment(found, twin)


def wrong_tensors(
    files: WeightFiles, used: Mapping[str, tuple[int, ...]], missing: Sequence[str], surplus: Sequence[str]
) -> list[str]:
    """Return the faults as texts. used: tensor → its shape in the model. missing: the used tensors that no file has;
    surplus: tensors that are not used."""
    placed = [f"`{name}` of {files.tensors[name].file}" for name in surplus]
    return [
        *_listed([f"`{name}`" for name in missing], "missing"),
        *_listed(placed, "not of this model"),
        *_mismatches({name: shape for name, shape in used.items() if name not in missing}, files),
    ]


def _as_stored(part: StoredPart, own: Mapping[str, str]) -> StoredPart:
    name = own[part.name]
    return part if name == part.name else evolve(part, name=name)


def _mismatches(used: Mapping[str, tuple[int, ...]], files: WeightFiles) -> Iterator[str]:
    """Yield texts on tensors of another shape than planned, or in a format that weights cannot have."""
    shapes = [name for name, shape in used.items() if files.tensors[name].shape != shape]
    if shapes:
        name = shapes[0]
        stored, planned = (" × ".join(map(str, each)) for each in (files.tensors[name].shape, used[name]))
        more = f", and {len(shapes) - 1:,} more have another shape" if len(shapes) > 1 else ""
        yield f"`{name}` is {stored} in {files.tensors[name].file} and {planned} in the model{more}"
    formats = [name for name in used if files.tensors[name].format not in LOADED]
    if formats:
        name = formats[0]
        more = f", and {len(formats) - 1:,} more" if len(formats) > 1 else ""
        stored = files.tensors[name]
        yield f"`{name}` is stored as {stored.format} in {stored.file}, which is not a weight format{more}"


def _listed(names: Sequence[str], what: str) -> Iterator[str]:
    if names:
        shown = ", ".join(names[:3])
        more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
        yield f"{shown}{more} {'is' if len(names) == 1 else 'are'} {what}"


@frozen(kw_only=True)
class IntegerForm:
    """One of the tensors that hold a matrix as integers, named as compressed-tensors names it. bits: of an integer.
    group: numbers of a row that share a scale."""

    suffix: Literal["weight", "weight_packed", "weight_scale", "weight_shape"]
    bits: int
    group: int

    def shape(self, rows: int, width: int) -> tuple[int, ...]:
        """Return its shape for a matrix of `rows` rows of `width` numbers."""
        shapes = {"weight": (rows, width), "weight_scale": (rows, width // self.group), "weight_shape": (2,)}
        return shapes.get(self.suffix, (rows, -(-width * self.bits // 32)))


@frozen
class BlockForm:
    """One of the two tensors that hold a matrix as fp8 numbers with a scale for each block of FP8_BLOCK rows and
    columns, named as DeepSeek-V3 names them."""

    suffix: Literal["weight", "weight_scale_inv"]

    def shape(self, rows: int, width: int) -> tuple[int, ...]:
        """Return its shape for a matrix of `rows` rows of `width` numbers."""
        return (rows, width) if self.suffix == "weight" else (rows // FP8_BLOCK, width // FP8_BLOCK)


@frozen
class WrittenTensor:
    """Tensor of a file: a parameter, one expert of it, or several parameters of one number format. parts: parameter →
    its part in the tensor. format: its safetensors name. copied: the tensor of another folder whose bytes it has.
    form: the part of a matrix of integers, or of fp8 numbers with scales, that it is."""

    parts: tuple[tuple[str, StoredPart], ...]
    format: str
    copied: StoredTensor | None = None
    form: IntegerForm | BlockForm | None = None

    @property
    def name(self) -> str:
        whole = self.parts[0][1].name
        return whole if self.form is None else whole.removesuffix("weight") + self.form.suffix

    @property
    def shape(self) -> tuple[int, ...]:
        whole = self.parts[0][1].shape
        return whole if self.form is None else self.form.shape(*whole)

    @property
    def bytes(self) -> int:
        return prod(self.shape) * SIZES[self.format]


@frozen
class WrittenFile:
    """File to write. tensors: in the order of their data."""

    name: str
    tensors: tuple[WrittenTensor, ...]

    @property
    def header(self) -> bytes:
        return header_of((tensor.name, tensor.format, tensor.shape) for tensor in self.tensors)

    @property
    def bytes(self) -> int:
        """Bytes of its data."""
        return sum(tensor.bytes for tensor in self.tensors)


# Format of the n-th tensor that a parameter is written as.
FormatOf = Callable[[ParameterSpec, int], str]


def lay_out(
    arch: Architecture,
    format_of: FormatOf,
    most: int,
    copied: Mapping[str, StoredTensor] = MappingProxyType({}),
    rounded: "Rounded | InBlocks | None" = None,
) -> tuple[WrittenFile, ...]:
    """Return the files of a model, tensors in the order of its parameters and then the copied ones, with at most `most`
    bytes in each; a larger tensor gets a file of its own. rounded: matrices written as integers or fp8 numbers."""
    others = (
        WrittenTensor(((name, StoredPart(name, tensor.shape)),), tensor.format, tensor)
        for name, tensor in copied.items()
    )
    own = _tensors(arch, format_of)
    return in_files((*(own if rounded is None else rounded.written(own)), *others), most)


@frozen(kw_only=True)
class Rounded:
    """Matrices that are written as integers. names: of parameters. group: numbers of a row that share a scale; None:
    the whole row. inputs: the inputs of their products are rounded too."""

    names: frozenset[str]
    bits: int
    group: int | None
    inputs: bool

    @property
    def packs(self) -> bool:
        """True if several integers share a number of the file: the form for weights alone."""
        return self.bits < 8 or not self.inputs

    def written(self, tensors: Iterable[WrittenTensor]) -> Iterator[WrittenTensor]:
        """Yield the tensors; for each whose parameters are all of these matrices, several."""
        for tensor in tensors:
            if not self.covers(tensor):
                yield tensor
                continue
            group = self.group or tensor.shape[-1]
            forms: dict[str, str] = {"weight_packed": "I32"} if self.packs else {"weight": "I8"}
            forms |= {"weight_scale": tensor.format, **({"weight_shape": "I64"} if self.packs else {})}
            for suffix, format in forms.items():
                form = IntegerForm(suffix=suffix, bits=self.bits, group=group)  # pyright: ignore[reportArgumentType]
                yield evolve(tensor, format=format, form=form)

    def covers(self, tensor: WrittenTensor) -> bool:
        """Return True if a tensor is written as integers."""
        parts = all(name in self.names and not part.transposed for name, part in tensor.parts)
        return parts and len(tensor.shape) == 2 and tensor.name.endswith(".weight")


@frozen
class InBlocks:
    """Matrices that are written as fp8 numbers with scales of blocks, unless blocks do not divide them. names: of
    parameters."""

    names: frozenset[str]

    def written(self, tensors: Iterable[WrittenTensor]) -> Iterator[WrittenTensor]:
        """Yield the tensors; for each whose parameters are all of these matrices, two. Experts of a layer have one
        form, as transformers' module has them."""
        tensors = list(tensors)
        plain = {_experts_of(each.name) for each in tensors if not self._divided(each)} - {""}
        for tensor in tensors:
            if not self._divided(tensor) or _experts_of(tensor.name) in plain:
                yield tensor
                continue
            yield evolve(tensor, format="F8_E4M3", form=BlockForm("weight"))
            yield evolve(tensor, format="F32", form=BlockForm("weight_scale_inv"))

    def _divided(self, tensor: WrittenTensor) -> bool:
        parts = all(name in self.names for name, _ in tensor.parts)
        fits = len(tensor.shape) == 2 and not any(extent % FP8_BLOCK for extent in tensor.shape)
        return parts and fits and tensor.name.endswith(".weight")

    def config(self, tensors: Iterable[WrittenTensor]) -> dict[str, Any]:
        """Return the `quantization_config` of a folder with these tensors."""
        plain = {each.name for each in tensors if each.form is None and len(each.shape) > 1}
        modules = {_experts_of(name) or name.removesuffix(".weight") for name in plain}
        return {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": FP8,
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
            # A tied head has no tensor of its own, and is a module all the same.
            "modules_to_not_convert": sorted({HEAD, *modules}),
        }


def _experts_of(name: str) -> str:
    """Return the module of the experts that a tensor is of; empty for other tensors."""
    before, found, _ = name.partition(".experts.")
    return f"{before}.experts" if found else ""


def in_files(tensors: Iterable[WrittenTensor], most: int) -> tuple[WrittenFile, ...]:
    """Return tensors grouped into files, in this order."""
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
    # Wider numbers come first, so that each is aligned to its size.
    ordered = (sorted(group, key=lambda tensor: -SIZES[tensor.format]) for group in groups)
    return tuple(WrittenFile(name, tuple(group)) for name, group in zip(names, ordered, strict=True))


def _tensors(arch: Architecture, format_of: FormatOf) -> Iterator[WrittenTensor]:
    """Yield tensors in the order of their first parameters."""
    names = stored_names(arch)
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
