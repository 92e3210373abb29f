"""Weights in files of transformers: safetensors headers by tensor, and the names and shapes that models have.

Only headers are read, no tensors. A file is 8 bytes with the length of the header, the header, and data:
https://github.com/huggingface/safetensors#format. Matrices are stored [out, in]; experts one by one, or stacked, with
gate and up projections in one tensor.
"""

import json
import os
import re
import stat
from collections.abc import Container, Iterable, Iterator, Mapping
from functools import lru_cache
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, cast

from attrs import evolve, field

from xtrain.dsl.checking.config_json import OF_TRANSFORMERS, STRICT
from xtrain.dsl.diagnostics.diagnostic import Remediable
from xtrain.dsl.schema.model import FAMILIES
from xtrain.dsl.schema.model_config import QUANTISATION
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import EMBEDDING, HEAD, SCORE, Architecture, ParameterSpec

if TYPE_CHECKING:
    from xtrain.plan.coded_weights import Codes

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
CONFIG: Final = "config.json"
MOST_DIMENSIONS: Final = 64  # the limit of torch
# The largest published models have a thousandth of this in a file; a longer header only takes time and memory.
LONGEST_HEADER: Final = 2**25  # bytes
MOST_TENSORS: Final = 200_000  # per file or index
# Bytes of an element; formats in LOADED can be parameters.
SIZES: Final = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip
LOADED: Final = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F64": "fp64"}
PICKLES: Final = ("*.bin", "*.pt", "*.pth")
CONVERT: Final = (
    "python -c \"from transformers import AutoModelForCausalLM as M; M.from_pretrained('{0}', dtype='auto')"
    ".save_pretrained('{0}-safetensors')\""
)


class WeightsUnreadable(Remediable):
    """Unreadable weights of a folder; the message names the file."""

    def __init__(self, message: str, hint: str = "copy or download the file again") -> None:
        super().__init__(message, hint)


@frozen
class StoredTensor:
    """Tensor in a file. file: its name in the folder. start: of its data in the file, in bytes. codes: form of its
    numbers if these are codes; `format` is then the one that they are written in again."""

    file: str
    format: str
    shape: tuple[int, ...]
    start: int
    codes: "Codes | None" = None

    @property
    def bytes(self) -> int:
        """Bytes of its data, without scales of codes."""
        numbers = prod(self.shape)
        return numbers * SIZES[self.format] if self.codes is None else numbers * self.codes.bits // 8

    @property
    def all_bytes(self) -> int:
        """Bytes of its data, with scales of codes."""
        return self.bytes if self.codes is None else self.bytes + prod(self.codes.shape) * SIZES[self.codes.format]


@frozen
class WeightFiles:
    """Weights of a folder. tensors: by name. digest: of `config.json` and of the headers and sizes of all files."""

    folder: str
    tensors: dict[str, StoredTensor]
    files: tuple[str, ...]
    digest: str

    @property
    def formats(self) -> tuple[str, ...]:
        """Number formats, the most frequent first."""
        found: dict[str, int] = {}
        for tensor in self.tensors.values():
            found[tensor.format] = found.get(tensor.format, 0) + prod(tensor.shape)
        return tuple(sorted(found, key=lambda each: -found[each]))

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.all_bytes for tensor in self.tensors.values())

    @property
    def coding(self) -> str:
        """Form of the numbers of matrices."""
        found = [each.codes.coding for each in self.tensors.values() if each.codes is not None]
        return found[0] if found else "plain"

    @property
    def words(self) -> str:
        """Formats of all tensors, and the form that they are dequantized from, if there is one."""
        formats = ", ".join(LOADED[each] for each in self.formats if each in LOADED)
        return formats if self.coding == "plain" else f"{formats}, dequantized from {self.coding}"


def header_of(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """Return the header of a file with these tensors, one after the other: (name, format, shape) of each."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, format, shape in tensors:
        begin, end = end, end + prod(shape) * SIZES[format]
        entries[name] = {"dtype": format, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data begins at a multiple of 8, because numbers are read in place
    return len(text).to_bytes(8, "little") + text


def read_weight_files(folder: str) -> WeightFiles:
    """Read the headers. Raises WeightsUnreadable."""
    path = Path(folder)
    names, listed = _names(path)
    return _read(folder, names, listed, tuple(_stamp(path / name) for name in (CONFIG, *names)))


def read_file(folder: str, name: str) -> WeightFiles:
    """Read the header of one file, whatever else is in the folder. Raises WeightsUnreadable."""
    path = Path(folder) / name
    _stamp(path)
    header, start, size = _header(path)
    digest = blake2b(f"{name}\0{size}\0".encode() + header, digest_size=16)
    return WeightFiles(folder, _tensors(path, header, start, size), (name,), digest.hexdigest())


@lru_cache(maxsize=8)  # read for every layout that is compared
def _read(
    folder: str, names: tuple[str, ...], listed: tuple[tuple[str, str], ...], stamps: tuple[Any, ...]
) -> WeightFiles:
    path, digest = Path(folder), blake2b(digest_size=16)
    content = (path / CONFIG).read_bytes()
    digest.update(content)
    tensors: dict[str, StoredTensor] = {}
    for name in names:
        header, start, size = _header(path / name)
        digest.update(f"{name}\0{size}\0".encode() + header)
        for tensor, stored in _tensors(path / name, header, start, size).items():
            if tensor in tensors:
                raise WeightsUnreadable(f"`{tensor}` is in {tensors[tensor].file} and in {name} of {folder}")
            tensors[tensor] = stored
    for tensor, name in listed:
        if tensor not in tensors or tensors[tensor].file != name:
            raise WeightsUnreadable(f"{path / INDEX} says that `{tensor}` is in {name}, and it is not there")
    if listed and (unlisted := tensors.keys() - dict(listed).keys()):
        raise WeightsUnreadable(f"{path / INDEX} does not name `{min(unlisted)}` of {tensors[min(unlisted)].file}")
    if QUANTISATION.encode() in content:
        from xtrain.plan.coded_weights import decoded_tensors

        try:
            config = OF_TRANSFORMERS.decode(content.decode())
        except (ValueError, RecursionError):  # reported where the config is read
            config = {}
        tensors = decoded_tensors(tensors, config if isinstance(config, dict) else {})
    return WeightFiles(folder, tensors, names, digest.hexdigest())


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError as error:
        raise WeightsUnreadable(f"{path.as_posix()} cannot be read: {error.strerror or error}") from error
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):  # opening a pipe would block
        raise WeightsUnreadable(f"{path.as_posix()} is not a regular file", "give a copy of the file")
    return found.st_mtime_ns, found.st_size, found.st_ino


def _names(path: Path) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Return the files with weights, and (tensor, file) of the index if there is one."""
    single, index = path / SINGLE, path / INDEX
    if os.path.lexists(index) and os.path.lexists(single):
        raise WeightsUnreadable(f"{path.as_posix()} has {SINGLE} and {INDEX}", "remove one of them")
    if os.path.lexists(single):
        return (SINGLE,), ()
    if not os.path.lexists(index):
        raise WeightsUnreadable(*_absent(path))
    _, size, _ = _stamp(index)
    if size > LONGEST_HEADER:
        raise WeightsUnreadable(f"{index.as_posix()} is not an index: it is larger than {LONGEST_HEADER:,} bytes")
    try:
        listed = STRICT.decode(index.read_bytes().decode())
    except OSError as error:
        raise WeightsUnreadable(f"{index.as_posix()} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise WeightsUnreadable(f"{index.as_posix()} is not an index: {error}") from error
    if not isinstance(listed, dict) or not isinstance(listed.get("weight_map"), dict):
        raise WeightsUnreadable(f"{index.as_posix()} is not an index: it has no `weight_map`")
    items = tuple(listed["weight_map"].items())
    if len(items) > MOST_TENSORS:
        raise WeightsUnreadable(*_too_many(index.as_posix(), len(items)))
    for tensor, name in items:
        ours = isinstance(name, str) and name.isprintable() and name.endswith(".safetensors") and "\\" not in name
        if not ours or Path(name).name != name:
            message = f"{index.as_posix()} says that `{tensor}` is in {name!r}, which is not in the folder"
            raise WeightsUnreadable(message, "an index names .safetensors files next to it")
    if not items:
        raise WeightsUnreadable(f"{index.as_posix()} names no tensor")
    return tuple(sorted({name for _, name in items})), items


def _too_many(name: str, count: int) -> tuple[str, str]:
    return f"{name} names {count:,} tensors, and at most {MOST_TENSORS:,} are read", "give the folder of another model"


def _absent(path: Path) -> tuple[str, str]:
    """Return (message, hint) for a folder without weights."""
    pickles = sorted(found.name for pattern in PICKLES for found in path.glob(pattern))
    if pickles:
        message = f"{path.as_posix()} has its weights as pickles ({pickles[0]}), which can run any code when read"
        return message, f"convert them: {CONVERT.format(path.as_posix())}"
    message = f"{path.as_posix()} has no weights: neither {SINGLE} nor {INDEX}"
    return message, "`weights = none` takes the shape alone and draws weights"


def _header(path: Path) -> tuple[bytes, int, int]:
    """Return (header, start of the data, size of the file)."""
    name = path.as_posix()
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            first = file.read(8)
            length = int.from_bytes(first, "little")
            header = file.read(length) if length <= min(LONGEST_HEADER, size - 8) else b""
            if not header.startswith(b"{"):
                raise WeightsUnreadable(*_other_file(path, first))
            return header, 8 + length, size
    except OSError as error:
        raise WeightsUnreadable(f"{name} cannot be read: {error.strerror or error}") from error


def _other_file(path: Path, first: bytes) -> tuple[str, str]:
    """Return (message, hint) for a file that is not safetensors. first: its first bytes."""
    name = path.as_posix()
    if first.startswith((b"PK\3\4", *(bytes((0x80, protocol)) for protocol in range(2, 6)))):
        message = f"{name} is not a safetensors file but a pickle, which can run any code when read"
        return message, f"convert it: {CONVERT.format(path.parent.as_posix())}"
    if first == b"version ":
        return f"{name} is not a safetensors file but a pointer of Git LFS to one", "fetch the file: git lfs pull"
    return f"{name} is not a safetensors file, or is cut off in its header", "copy or download the file again"


def _tensors(path: Path, header: bytes, start: int, size: int) -> dict[str, StoredTensor]:
    name = path.as_posix()
    if (count := header.count(b'"data_offsets"')) > MOST_TENSORS:
        raise WeightsUnreadable(*_too_many(name, count))
    try:
        listed = STRICT.decode(header.decode())
    except (ValueError, RecursionError) as error:
        raise WeightsUnreadable(f"{name} is not a safetensors file: its header cannot be read: {error}") from error
    listed.pop("__metadata__", None)  # text that begins with a brace is an object
    places = {}
    for tensor, entry in listed.items():
        try:
            places[tensor] = _place(entry)
        except (ValueError, KeyError, TypeError) as error:
            message = f"{name} is damaged: `{tensor}` has no dtype, shape and data_offsets of a tensor"
            raise WeightsUnreadable(message) from error
    found, end = {}, 0
    for tensor, (format, shape, begin, stop) in sorted(places.items(), key=lambda item: (item[1][2], item[1][3])):
        if format not in SIZES:
            raise WeightsUnreadable(f"`{tensor}` of {name} has the unknown format {format}", "it cannot be read")
        if begin != end or stop - begin != prod(shape) * SIZES[format]:
            raise WeightsUnreadable(f"{name} is damaged: `{tensor}` has {stop - begin:,} bytes at {begin:,}")
        found[tensor], end = StoredTensor(path.name, format, shape, start + begin), stop
    if start + end != size:
        cut = [tensor for tensor, each in found.items() if each.start + each.bytes > size]
        what = f"is cut off: `{cut[0]}` is not complete" if cut else "has bytes after its last tensor"
        raise WeightsUnreadable(f"{name} {what}; it has {size:,} bytes and should have {start + end:,}")
    return found


def _place(entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    format, shape, (begin, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if len(shape) > MOST_DIMENSIONS:
        raise ValueError("not a tensor")
    whole = all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in (*shape, begin, stop))
    if not isinstance(format, str) or not whole:
        raise ValueError("not a tensor")
    return format, shape, begin, stop


LAYERS: Final = "model.layers."


@frozen
class StoredPart:
    """Part of a parameter in a stored tensor, `name` of `shape`.

    expert: index along the parameter's first dimension; None: the whole parameter. transposed: rows of the stored
    matrices are columns here. first, step: index i of the parameter's last dimension is index first + step · i of the
    stored tensor. Parts with a step are interleaved with as many parameters. rows: first and end of the rows of the
    parameter, or of the expert's matrix, that the tensor holds; None: all. top: row of the tensor at which the part
    begins; the tensor's other rows hold other parameters.
    """

    name: str
    shape: tuple[int, ...]
    expert: int | None = None
    transposed: bool = False
    first: int = 0
    step: int = 1
    rows: tuple[int, int] | None = None
    top: int = 0


# Alternative forms in files; the first one whose tensors all exist is read.
Alternatives = tuple[tuple[StoredPart, ...], ...]


# one_by_one: a tensor for each matrix of each expert. stacked: the form of most models in memory in transformers 5, [E,
# out, in], with gate and up projections above each other. interleaved: [E, in, out], with alternating columns of both.
# mxfp4: the codes of these, [E, out, in].
ExpertsForm = Literal["one_by_one", "stacked", "interleaved", "mxfp4"]


@frozen(kw_only=True)
class StoredNames:
    """Names in the files of a family.

    modules: start of a name inside a block → its start in files. matrices: the same for the matrices of experts stored
    one by one. experts: forms of experts in files, the usual one first; in the other forms, modules keep the names used
    here. ignored: ends of names of tensors that hold nothing learned. enclosed: for a model stored inside another,
    start of its names in those files → in files of its own. beside: starts of the names of other parts. buffers: ends
    of names of stored tensors that are not parameters. further_tokens: name of a matrix in the layers after the last
    one that predict further tokens, as in DeepSeek-V3, stored with copies of the embedding and of the head; layers past
    the model's last one are ignored. Empty: files have no such layers. others: tensors of other parts of a model, which
    are not read and which an export copies. gated: experts have gates, stacked with `up_proj`. peft_gathers: PEFT with
    transformers 5 reads adapters of experts that are stored one by one.
    """

    modules: Mapping[str, str] = field(factory=dict)
    matrices: Mapping[str, str] = field(factory=dict)
    experts: tuple[ExpertsForm, ...] = ("one_by_one", "stacked")
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    enclosed: Mapping[str, str] = field(factory=dict)
    beside: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    further_tokens: str = ""
    others: frozenset[str] = frozenset()
    gated: bool = True
    peft_gathers: bool = True

    def of(self, parameter: ParameterSpec) -> Alternatives:
        """Return the possible places of a parameter, the usual form first."""
        if parameter.expert:
            return tuple(self._experts(parameter, form) for form in self.experts)
        if parameter.name in (HEAD_WEIGHT, SCORE_WEIGHT):
            return ((StoredPart(parameter.name, parameter.shape),),)
        plain = f"model.{of_module(parameter.name)}"
        names = dict.fromkeys((self._renamed(plain), plain))
        return tuple((StoredPart(name, parameter.shape),) for name in names)

    def in_modules(self, parameter: ParameterSpec) -> tuple[StoredPart, ...]:
        """Return the parts of a parameter by the names of modules of transformers, which PEFT uses."""
        return self.of(parameter)[0]

    def is_ignored(self, name: str, arch: Architecture, stored: Container[str]) -> bool:
        """Return True if a stored tensor is not part of the model. stored: the names of all tensors."""
        if name.endswith(self.ignored) or name.startswith(self.beside) or name in self.others:
            return True
        if not self.further_tokens or not name.startswith(LAYERS):
            return False
        layer, _, inside = name.removeprefix(LAYERS).partition(".")
        number = int(layer) if layer.isdecimal() else -1
        if number in arch.further_layers:
            return inside in COPIES
        return number >= arch.layers and f"{LAYERS}{layer}.{self.further_tokens}" in stored

    def modules_in(self, arch: Architecture, stored: Iterable[str]) -> int:
        """Return how many modules that predict further tokens the files have after the blocks of a model."""
        if not self.further_tokens:
            return 0
        layers = (name.removeprefix(LAYERS).partition(".") for name in stored if name.startswith(LAYERS))
        return sum(inside == self.further_tokens and int(layer) >= arch.blocks for layer, _, inside in layers)

    def stored_part(self, arch: Architecture) -> Architecture:
        """Return the model as stored: without modules that predict further tokens if the family's files have no place
        for them."""
        return arch if self.further_tokens else arch.core

    def copies(self, arch: Architecture) -> Iterator[tuple[str, str]]:
        """Yield (name of the copy, parameter) for tensors that files store again in each module that predicts further
        tokens."""
        if self.further_tokens:
            for layer in arch.further_layers:
                for inside, parameter in zip(COPIES, (EMBEDDING_WEIGHT, f"{arch.head_module}.weight"), strict=True):
                    yield f"{LAYERS}{layer}.{inside}", parameter

    def own_names(self, stored: Iterable[str]) -> dict[str, str]:
        """Return name in files of the model alone → stored name."""
        found: dict[str, str] = {}
        for name in stored:
            start = next((each for each in self.enclosed if name.startswith(each)), "")
            found[self.enclosed.get(start, "") + name.removeprefix(start)] = name
        return found

    def _renamed(self, name: str) -> str:
        for ours, theirs in self.modules.items():
            name = name.replace(f".{ours}.", f".{theirs}.")
        return name

    def _experts(self, parameter: ParameterSpec, form: ExpertsForm) -> tuple[StoredPart, ...]:
        if form == "one_by_one":
            return tuple(self._one_by_one(parameter))
        part = _fused(parameter, interleaved=form != "stacked", gated=self.gated)
        if form == "mxfp4" and len(part.shape) == 3:
            experts, rows, columns = part.shape
            return (evolve(part, name=f"{part.name}_blocks", shape=(experts, columns, rows), transposed=True),)
        return (part,)

    def _one_by_one(self, parameter: ParameterSpec) -> Iterator[StoredPart]:
        module, _, matrix = self._renamed(f"model.{parameter.name}").rpartition(".")
        experts, rows, columns = parameter.shape
        for expert in range(experts):
            name = f"{module}.{expert}.{self.matrices.get(matrix, matrix)}.weight"
            yield StoredPart(name, (columns, rows), expert=expert, transposed=True)


def _fused(parameter: ParameterSpec, *, interleaved: bool, gated: bool) -> StoredPart:
    """Return the part of a stacked tensor that holds a parameter of experts: matrices [E, in, out], or biases [E,
    out]."""
    module, _, name = f"model.{parameter.name}".rpartition(".")
    *others, width = parameter.shape
    first, step = 0, 1
    if gated and (matrix := name.removesuffix("_bias")) in GATE_UP:
        name = name.replace(matrix, "gate_up_proj")
        first = GATE_UP.index(matrix) * (1 if interleaved else width)
        step = 2 if interleaved else 1
        width *= 2
    transposed = not interleaved and len(others) > 1
    shape = (others[0], width, others[1]) if transposed else (*others, width)
    return StoredPart(f"{module}.{name}", shape, transposed=transposed, first=first, step=step)


def of_module(name: str) -> str:
    """Return the name in files of a parameter of a block; it differs in modules that predict further tokens."""
    start, dot, inside = name.partition(".join.")
    if dot:
        return f"{start}.{inside}"
    found = re.fullmatch(r"(layers\.\d+)\.norm\.weight", name)
    return name if found is None else f"{found[1]}.shared_head.norm.weight"


COPIES: Final = ("embed_tokens.weight", "shared_head.head.weight")
GATE_UP: Final = ("gate_proj", "up_proj")
EMBEDDING_WEIGHT = f"{EMBEDDING}.weight"
HEAD_WEIGHT = f"{HEAD}.weight"
SCORE_WEIGHT = f"{SCORE}.weight"


class _StoringFamily(Protocol):
    """Model family as files use it; its base class is `PlannedModel` (`contracts/models.py`)."""

    def names_in_files(self, arch: Architecture) -> StoredNames | None: ...


def known_names(arch: Architecture) -> StoredNames | None:
    """Return the names in files of a model's family; None if there are no files of the family."""
    if "user" in arch.own or arch.family not in FAMILIES:
        return None
    return cast(_StoringFamily, FAMILIES[arch.family]).names_in_files(arch)


def stored_names(arch: Architecture) -> StoredNames:
    """Return the names in files of a model's family, which has files."""
    names = known_names(arch)
    assert names is not None, f"{arch.family} has no files"
    return names
