"""Adapters in PEFT's file format: `adapter_config.json`, and A and B of every matrix in safetensors.

A is stored as [rank, inputs] and B as [outputs, rank], under the name of the module in the files of the model. Routed
experts are read and written one by one, the only form that all versions of PEFT and transformers read.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from attrs import evolve

from xtrain.dsl.checking.config_json import STRICT
from xtrain.dsl.diagnostics.diagnostic import Remediable
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import HEAD, Architecture, BlockParameter, ParameterSpec, parameters
from xtrain.plan.parameters import all_matrices, name_of
from xtrain.plan.weight_files import (
    EMBEDDING_WEIGHT,
    StoredNames,
    StoredPart,
    WeightFiles,
    WeightsUnreadable,
    known_names,
    read_file,
)
from xtrain.plan.weight_layout import Assignment, WrittenFile, WrittenTensor, wrong_tensors
from xtrain.regular_files import open_regular

PEFT_CONFIG: Final = "adapter_config.json"
PEFT_WEIGHTS: Final = "adapter_model.safetensors"
PEFT_PICKLE: Final = "adapter_model.bin"
PREFIX: Final = "base_model.model."
LARGEST: Final = 2**24  # bytes of a config file
# Keys that do not change what an adapter computes once its tensors are read.
HARMLESS: Final = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "ensure_weight_tying",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "megatron_core",
        "modules_to_save",
        "peft_version",
        "qalora_group_size",
        "revision",
        "target_modules",
        "target_parameters",
        "task_type",
    }
)
# Keys that must have one of these values; absent counts as null.
ONLY: Final[Mapping[str, tuple[Any, ...]]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),
    "use_qalora": (False,),
    "use_bdlora": (False,),
    # Other values change the matrices of the model under the adapter.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
    "loftq_config": ({},),
}


class PeftUnreadable(Remediable):
    """Folder without a readable adapter. code: of the diagnostic."""

    def __init__(self, code: str, message: str, hint: str) -> None:
        super().__init__(message, hint)
        self.code = code


@frozen
class PeftMatrix:
    """Adapter of one matrix in a file. parameter: the matrix's name in the model. modules: names in files of the model;
    for a stack of experts, one for each expert."""

    parameter: str
    modules: tuple[str, ...]
    rank: int


@frozen(kw_only=True)
class PeftFolder:
    """Adapter read from a folder. config: the keys that are not null; lines: their line numbers, from 1. matrices:
    those with A and B in the files. full: parameters of the model stored whole. digest: of the config and of the
    header and size of the weights."""

    folder: str
    config: dict[str, Any]
    lines: dict[str, int]
    files: WeightFiles
    matrices: tuple[PeftMatrix, ...]
    full: tuple[str, ...]
    digest: str

    def place(self, key: str) -> str:
        """Return the file and line of a key, for display."""
        name = f"{self.folder}/{PEFT_CONFIG}"
        return f"{name}:{self.lines[key]}" if key in self.lines else name

    def pattern(self, key: str, module: str) -> Any:
        """Return the value of the pattern that matches a module, as PEFT looks it up; None if none matches."""
        for pattern, value in self.config.get(key, {}).items():
            if re.fullmatch(rf"(.*\.)?({pattern})", module):
                return value
        return None


# Reading --------------------------------------------------------------------------------------------------------------


def read_peft(folder: str, arch: Architecture, own: frozenset[str]) -> PeftFolder:
    """Read the adapter of a folder. arch: the model without adapter. own: keys that the kind of adapter understands.

    Raises PeftUnreadable.
    """
    config, lines, content = _config(folder, own)
    files = _files(folder)
    names = _names(arch)
    matrices = tuple(_matrices(arch, names, files))
    (head,) = _modules(names, _specs(arch)[arch.head_parameter.name])
    if f"{PREFIX}{head}.base_layer.weight" in files.tensors:  # PEFT adds it by default
        message = f"{folder} has {head} next to its adapter, which may differ from the model's"
        raise PeftUnreadable("X522", message, "save it again with `save_embedding_layers=False`")
    modules = {matrix.parameter for matrix in matrices}
    full = tuple(
        each.name
        for each in parameters(arch)
        if each.name not in modules and PREFIX + names.in_modules(each)[0].name in files.tensors
    )
    digest = blake2b(content + files.digest.encode(), digest_size=16).hexdigest()
    if arch.tie_embeddings and EMBEDDING_WEIGHT in full and not config.get("ensure_weight_tying"):
        message = f"{folder} has the embedding, trained in full, but its head is the old embedding"
        hint = "save it again with `ensure_weight_tying`: the head of this model is the embedding"
        raise PeftUnreadable("X522", message, hint)
    found = PeftFolder(
        folder=folder, config=config, lines=lines, files=files, matrices=matrices, full=full, digest=digest
    )
    if not matrices:
        first = min(files.tensors, default="")
        message = f"{folder}/{PEFT_WEIGHTS} has A and B for no matrix of this model"
        hint = f"its first tensor is `{first}`: is it an adapter of another model?" if first else "it has no tensors"
        raise PeftUnreadable("X524", message, hint)
    return found


def assign_peft(arch: Architecture, trained: tuple[ParameterSpec, ...], files: WeightFiles) -> Assignment:
    """Return the source of every trained parameter in the files. Raises ValueError, whose text names the mismatch."""
    names = _names(arch.base)
    specs = _specs(arch)
    parts = {each.name: peft_parts(specs, names, each) for each in trained}
    used = {part.name: part.shape for each in parts.values() for part in each}
    missing = [name for name in used if name not in files.tensors]
    surplus = [name for name in files.tensors if name not in used]
    if (head := _tied_head(arch, trained)) is not None and head.name in surplus:
        (embedding,) = parts[EMBEDDING_WEIGHT]
        if embedding.name not in missing and not _alike(files, embedding.name, head.name):
            raise ValueError(f"`{head.name}` is not `{embedding.name}`, and the model has one tensor for both")
        surplus.remove(head.name)
    if problems := wrong_tensors(files, used, missing, surplus):
        raise ValueError("; ".join(problems))
    return Assignment(parts)


def _tied_head(arch: Architecture, trained: Sequence[ParameterSpec]) -> StoredPart | None:
    """Return the tensor that files store as head next to a tied embedding that is trained in full; otherwise None. PEFT
    writes both and reads no file without them."""
    embedding = next((each for each in trained if each.name == EMBEDDING_WEIGHT and not each.adapter), None)
    if not arch.tie_embeddings or embedding is None:
        return None
    (part,) = _names(arch.base).in_modules(evolve(embedding, name=f"{HEAD}.weight"))
    return _prefixed(part, part.name)


def _alike(files: WeightFiles, one: str, other: str) -> bool:
    """Return True if two tensors have the same bytes; False if they cannot be read."""
    pair = [files.tensors[name] for name in (one, other)]
    if pair[0].format != pair[1].format or pair[0].shape != pair[1].shape:
        return False
    try:
        paths = [Path(files.folder) / each.file for each in pair]
        with open_regular(paths[0]) as first, open_regular(paths[1]) as second:
            for file, tensor in zip((first, second), pair, strict=True):
                file.seek(tensor.start)
            for left in range(pair[0].bytes, 0, -LARGEST):
                if first.read(min(left, LARGEST)) != second.read(min(left, LARGEST)):
                    return False
    except OSError:
        return False
    return True


def peft_parts(
    specs: Mapping[str, ParameterSpec], names: StoredNames, parameter: ParameterSpec
) -> tuple[StoredPart, ...]:
    """Return the stored parts of a trained parameter, of an adapter or of the model itself. specs: see `_specs`."""
    if not parameter.adapter:
        return tuple(_prefixed(part, part.name) for part in names.in_modules(parameter))
    matrix = specs[parameter.adapter]
    return tuple(_factor_parts(names, matrix, parameter))


def _factor_parts(names: StoredNames, matrix: ParameterSpec, factor: ParameterSpec) -> Iterator[StoredPart]:
    owner = matrix.name if matrix.expert else matrix.name.removesuffix(".weight")
    ending = factor.name.removeprefix(owner)[1:]  # `lora_A.weight` for a module, `lora_A` for a stack of experts
    turned = matrix.expert and not is_expert_magnitude(factor)
    ending += ".weight" if turned else ""
    for part in names.in_modules(matrix):
        module = part.name.removesuffix(".weight")
        shape = factor.shape[:0:-1] if matrix.expert else factor.shape
        yield StoredPart(f"{PREFIX}{module}.{ending}", shape, expert=part.expert, transposed=turned)


def is_expert_magnitude(factor: ParameterSpec) -> bool:
    """Return True for the magnitudes that scale outputs of routed experts, one row for each expert; factors are
    matrices."""
    return bool(factor.adapter) and factor.expert and len(factor.shape) == 2


def _prefixed(part: StoredPart, name: str) -> StoredPart:
    return StoredPart(PREFIX + name, part.shape, part.expert, part.transposed, part.first, part.step)


def _names(arch: Architecture) -> StoredNames:
    names = known_names(arch)
    if names is None:
        message = f"the family {arch.family} has no known files, and PEFT names matrices as in files"
        raise PeftUnreadable("X525", message, "train its adapter without `from`")
    return names


def _matrices(arch: Architecture, names: StoredNames, files: WeightFiles) -> Iterator[PeftMatrix]:
    specs = _specs(arch)
    for layer, matrix in all_matrices(arch):
        parameter = name_of(layer, matrix.name)
        modules = _modules(names, specs[parameter])
        if (a := files.tensors.get(f"{PREFIX}{modules[0]}.lora_A.weight")) is not None and len(a.shape) == 2:
            yield PeftMatrix(parameter, modules, a.shape[0])


def _specs(arch: Architecture) -> dict[str, ParameterSpec]:
    """Return name → parameter of the model without adapter, with its head even if the head is tied to the embedding."""
    head = arch.head_parameter
    return {
        head.name: ParameterSpec(name=head.name, shape=head.shape, decays=head.decays),
        **{each.name: each for each in parameters(arch.base)},
    }


def _modules(names: StoredNames, matrix: ParameterSpec) -> tuple[str, ...]:
    """Return the module names of a matrix in the files."""
    return tuple(part.name.removesuffix(".weight") for part in names.in_modules(matrix))


def _config(folder: str, own: frozenset[str]) -> tuple[dict[str, Any], dict[str, int], bytes]:
    path = Path(folder) / PEFT_CONFIG
    name = path.as_posix()
    try:
        with open_regular(path) as file:
            content = file.read(LARGEST + 1)
    except OSError as error:
        what = f"{name} cannot be read: {error.strerror or error}"
        raise PeftUnreadable("X520", what, f"give a folder saved by PEFT, with {PEFT_CONFIG}") from error
    if len(content) > LARGEST:
        raise PeftUnreadable("X520", f"{name} is larger than {LARGEST >> 20} MiB", f"it is not an {PEFT_CONFIG}")
    try:
        text = content.decode()
        config = STRICT.decode(text)
    except (ValueError, RecursionError) as error:
        raise PeftUnreadable("X520", f"{name} is not a JSON object: {error}", "copy the file again") from error
    if not isinstance(config, dict):
        raise PeftUnreadable("X520", f"{name} is not a JSON object", "copy the file again")
    for key, value in config.items():
        if key in ONLY:
            if value is not None and not any(value == each and type(value) is type(each) for each in ONLY[key]):
                wanted = " or ".join(json.dumps(each) for each in ONLY[key])
                message = f"`{key}` is {json.dumps(value)} in {name}, which xtrain does not support"
                raise PeftUnreadable("X522", message, f"it must be {wanted}")
        elif value not in (None, False) and key not in HARMLESS and key not in own:
            message = f"`{key}` of {name} is unknown to xtrain and may change what the adapter computes"
            raise PeftUnreadable("X522", message, f"remove it from {PEFT_CONFIG} if it changes nothing")
    if "peft_type" not in config:
        raise PeftUnreadable("X520", f"{name} has no `peft_type`", "give a folder saved by PEFT")
    lines = {
        key: text[: found.start()].count("\n") + 1 for key in config if (found := re.search(f'"{key}"\\s*:', text))
    }
    return {key: value for key, value in config.items() if value is not None}, lines, content


def _files(folder: str) -> WeightFiles:
    if not (Path(folder) / PEFT_WEIGHTS).exists() and (Path(folder) / PEFT_PICKLE).exists():
        message = f"{folder} has its adapter as a pickle ({PEFT_PICKLE}), which can run any code when read"
        hint = "load it with PEFT and save it again: it then writes safetensors"
        raise PeftUnreadable("X524", message, hint)
    try:
        return read_file(folder, PEFT_WEIGHTS)
    except WeightsUnreadable as problem:
        raise PeftUnreadable("X524", str(problem), problem.hint) from problem


# Writing --------------------------------------------------------------------------------------------------------------

# The order of safetensors: by format, then by name.
ORDER: Final = ("F64", "F32", "BF16", "F16")


def lay_out_adapter(
    arch: Architecture, trained: Sequence[ParameterSpec], format_of: Callable[[ParameterSpec, str], str]
) -> WrittenFile:
    """Return the layout of an adapter's file. format_of: (parameter, name of the tensor) → its format."""
    names, specs = _names(arch.base), _specs(arch)
    tensors = [
        WrittenTensor(((each.name, part),), format_of(each, part.name))
        for each in trained
        for part in peft_parts(specs, names, each)
    ]
    if (head := _tied_head(arch, trained)) is not None:
        embedding = next(each for each in trained if each.name == EMBEDDING_WEIGHT)
        tensors.append(WrittenTensor(((embedding.name, head),), format_of(embedding, head.name)))
    return WrittenFile(PEFT_WEIGHTS, tuple(sorted(tensors, key=lambda each: (ORDER.index(each.format), each.name))))


def not_written_for_peft(arch: Architecture, trained: Sequence[ParameterSpec]) -> tuple[str, str] | None:
    """Return (reason, remedy) if PEFT cannot represent an adapter; otherwise None."""
    if arch.adapter is None:
        return "the run trains no adapter", "leave `adapter` out to write the model"
    names = known_names(arch)
    if names is None:
        return (
            f"the family {arch.family} has no known files, and PEFT names matrices as in files",
            "no format is known",
        )
    if wrong := [each.name for each in trained if each.expert and not each.adapter]:
        return f"PEFT cannot store {wrong[0]}, which is trained in full", "merge the adapter into the model"
    if names.experts[0] != "one_by_one" and (wrong := [each.adapter for each in trained if each.expert]):
        message = (
            f"files of {arch.family} have {wrong[0]} in one tensor, for which PEFT has no form that all versions read"
        )
        return message, "merge the adapter into the model"
    return None


AdapterKeys = Callable[[Sequence[tuple[int | None, BlockParameter, tuple[str, ...]]]], Mapping[str, Any]]


def peft_config(
    arch: Architecture, trained: Sequence[ParameterSpec], base: str | None, adapter_keys: AdapterKeys
) -> dict[str, Any]:
    """Return the keys of `adapter_config.json`. base: the folder or repository of the model under the adapter.
    adapter_keys: `for_peft` of the adapter."""
    names = _names(arch.base)
    specs = _specs(arch)
    own = {each.adapter for each in trained}
    matrices = [
        (layer, matrix, _modules(names, specs[name]))
        for layer, matrix in all_matrices(arch)
        if (name := name_of(layer, matrix.name)) in own
    ]
    adapted = {module for _, _, modules in matrices for module in modules}
    full = {names.in_modules(each)[0].name.rpartition(".")[0]: None for each in trained if not each.adapter}
    tied = arch.tie_embeddings and any(each.name == EMBEDDING_WEIGHT and not each.adapter for each in trained)
    return {
        "base_model_name_or_path": base,
        "bias": "none",
        **({"ensure_weight_tying": True} if tied else {}),
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": list(full) or None,
        "peft_type": "LORA",
        "target_modules": _target_modules(arch, names, adapted),
        "task_type": "CAUSAL_LM" if arch.has_logits else "SEQ_CLS",
        **adapter_keys(matrices),
    }


def unread_by_peft(arch: Architecture, trained: Sequence[ParameterSpec]) -> Iterator[str]:
    """Yield what PEFT with transformers 5 does not do with an adapter that it has a form for.

    For the types of models in its own table it gathers adapters of experts into adapters of stacks. There it compares
    the last part of names, so it takes matrices outside of experts for experts too.
    """
    names = _names(arch.base)
    own = {each.adapter for each in trained if each.adapter}
    lasts: dict[bool, dict[str, str]] = {True: {}, False: {}}  # of experts, of others: last part → module
    experts: set[str] = set()
    joined: dict[str, str] = {}  # last part → module
    for each in parameters(arch.base):
        module = _modules(names, each)[0]
        last = module.rpartition(".")[2]
        if each.expert and len(each.shape) == 3:
            experts.update((last, "gate_proj", "up_proj") if last == "gate_up_proj" else (last,))
        if each.name in own:
            lasts[each.expert].setdefault(last, each.name if each.expert else module)
            if not any(part.name.startswith(module) for parts in names.of(each) for part in parts):
                joined.setdefault(last, module)
    if joined:
        yield f"leaves out {next(iter(joined.values()))} and others that it has in one matrix: merge for other programs"
    if not names.peft_gathers:
        yield from (f"leaves out {name} and all other routed experts" for name in [*lasts[True].values()][:1])
    elif taken := [module for last, module in lasts[False].items() if last in experts]:
        yield f"takes {taken[0]}, and others named like expert matrices, for experts, and leaves them out or fails"
    elif len(lasts[True].keys() - {names.matrices.get("down_proj", "down_proj")}) == 1:
        yield f"fails for {next(iter(lasts[True].values()))}, because it needs both gate and up of experts"
    if (stack := next((each.adapter for each in trained if is_expert_magnitude(each)), None)) is not None:
        yield f"has no magnitudes of {stack} and cannot read this adapter"


def _target_modules(arch: Architecture, names: StoredNames, adapted: Set[str]) -> list[str]:
    """Return the last parts of names if they match nothing else; otherwise whole names."""
    matrices = [each for each in parameters(arch.base) if len(each.shape) > 1]
    every = {part.name.removesuffix(".weight") for each in matrices for part in names.in_modules(each)}
    last = {name.rpartition(".")[2] for name in adapted}
    if all(name in adapted for name in every if name.rpartition(".")[2] in last):
        return sorted(last)
    return sorted(adapted)
