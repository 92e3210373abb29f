"""Adapters of a spec: targets checked against the model, settings and files read from folders that PEFT saved."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

from attrs import evolve

from xtrain.contracts.models import PlannedAdapter
from xtrain.dsl.diagnostics.suggest import did_you_mean
from xtrain.dsl.schema.adapters import Adapter, TaskAdapters
from xtrain.dsl.schema.component import planned
from xtrain.dsl.schema.setting import Auto
from xtrain.dsl.spec import Spec
from xtrain.plan.architecture import EMBEDDING, HEAD, Architecture, BlockParameter, name_in_block, parameters
from xtrain.plan.findings import Findings, checks
from xtrain.plan.groups import alone
from xtrain.plan.parameters import (
    ALL_LINEAR,
    all_matrices,
    blocks_beyond,
    covers,
    frozen_names,
    instead,
    is_target,
    matrices_of,
    means,
)
from xtrain.plan.peft import PEFT_WEIGHTS, PeftFolder, PeftUnreadable, assign_peft, read_peft
from xtrain.text.units import plural

ADAPTER_RULE: Final = "model.adapter"
TARGETS: Final = "targets"
TRAIN: Final = "train"
# Projections as most families of transformers call them. Lists of targets are copied between models, and PEFT passes
# over names that the model lacks, as long as another target matches.
USUAL_NAMES: Final = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})


@checks("model.frozen", reads="model.* adapter.* tokenizer.source loss.kind")
@checks("model.adapter", reads="model.* adapter adapter.* tokenizer.source loss.kind")
@checks("model.tasks.*", reads="model.* task.{}.* tokenizer.source")
def check_adapter(spec: Spec, arch: Architecture, found: Findings) -> None:
    """Check that every target matches a matrix that can have an adapter, and every name in `train` a part of the
    model."""
    if arch.adapter is None:
        return
    if spec.model.frozen:
        message = "an adapter freezes the whole model, so `frozen` has no effect"
        found.fail(
            ADAPTER_RULE,
            "X435",
            "model.frozen",
            message,
            "remove it; `train` of the adapter names parts to train in full",
        )
        return
    if arch.router_bias_speed > 0:
        message = "routers would move their balance biases, which are part of the model and not of the adapter"
        found.fail(ADAPTER_RULE, "X435", "model.router.bias_speed", message, "use bias_speed 0")
        return
    if isinstance(arch.adapter, TaskAdapters):
        for task in arch.adapter.tasks:
            _check(alone(arch, task), f"model.tasks.{task}", f"task.{task}.adapter", found)
    else:
        _check(arch, ADAPTER_RULE, "adapter", found)


def _check(arch: Architecture, rule: str, block: str, found: Findings) -> None:
    """Check one adapter of the model `arch`. block: its path in the spec."""
    assert arch.adapter is not None
    adapter = planned(arch.adapter, PlannedAdapter)
    wrong = _wrong_target(arch, adapter.targets) or _wrong_module(arch, adapter.train)
    if (wrong := wrong or adapter.unfit(arch) or _in_full_and_beside(arch, adapter.train)) is not None:
        setting, message, hint = wrong
        found.fail(rule, "X435", f"{block}.{setting}", message, hint)
        return
    absent = _absent_target(arch, adapter.targets)
    if (idle := absent or _idle_target(arch, adapter.targets) or _idle_range(arch) or adapter.excess(arch)) is not None:
        setting, message, hint = idle
        found.warn(rule, "W401", f"{block}.{setting}", message, hint)
        return
    count = len({tensor.adapter for tensor in parameters(arch)} - {""})
    found.passed(rule, f"{plural(count, 'matrix')} with an adapter")


def _wrong_target(arch: Architecture, targets: tuple[str, ...]) -> tuple[str, str, str] | None:
    """Return (setting, error, remedy) for an invalid target; None if all are valid."""
    if not targets:
        return TARGETS, "no matrix has an adapter", f"name matrices, or leave targets out: {ALL_LINEAR}"
    matrices = all_matrices(arch)
    for number, target in enumerate(targets):
        if any(is_target(target, layer, matrix) for layer, matrix in matrices):
            continue
        if _may_be_absent(target, targets, arch):
            continue
        path = f"{TARGETS}.{number}"
        if target == ALL_LINEAR:
            return path, "no matrix of the model can have an adapter", "train it in full"
        return path, f"no matrix of the model matches `{target}`", _instead(target, arch, matrices)
    return None


def _may_be_absent(target: str, targets: tuple[str, ...], arch: Architecture) -> bool:
    """Return True for the usual name of a projection that no parameter of the model has, if another target matches."""
    if target not in USUAL_NAMES or any(means(target, layer, each.name) for layer, each in _others(arch)):
        return False
    matrices = all_matrices(arch)
    if any(means(target, layer, matrix.name) for layer, matrix in matrices):
        return False  # routed experts
    return any(is_target(other, layer, matrix) for other in targets for layer, matrix in matrices)


def _absent_target(arch: Architecture, targets: tuple[str, ...]) -> tuple[str, str, str] | None:
    """Return (setting, warning, remedy) for usual names that the model does not have; None if there is none."""
    matrices = all_matrices(arch)
    absent = [each for each in targets if not any(is_target(each, layer, matrix) for layer, matrix in matrices)]
    if not absent:
        return None
    names = ", ".join(f"`{each}`" for each in absent)
    path = f"{TARGETS}.{targets.index(absent[0])}"
    return path, f"the model has no {names}: no effect, as in PEFT", _instead(absent[0], arch, matrices)


def _instead(target: str, arch: Architecture, matrices: Sequence[tuple[int | None, BlockParameter]]) -> str:
    """Return a replacement for a target that matches nothing."""
    meant = next(((layer, matrix) for layer, matrix in matrices if means(target, layer, matrix.name)), None)
    if meant is not None:
        layer, experts = meant
        if layer is None:
            return f"the head has a name of its own: write `{HEAD}`"
        module = experts.owner.rpartition(".")[2]
        return f"it matches only routed experts, which need the name of their module: write `{module}.{target}`"
    for layer, parameter in _others(arch):
        if not means(target, layer, parameter.name):
            continue
        what = "the embedding" if parameter.owner == EMBEDDING else f"`{parameter.owner}`"
        what = "the router" if parameter.router else what
        pattern = parameter.owner if layer is None else f"layers.*.{parameter.owner}"
        return f'{what} can have no adapter; `train = ["{pattern}"]` trains it in full'
    if (layer := _layer_beyond(target, arch)) is not None:
        return f"there is no block {layer}: the blocks are 0 to {arch.layers - 1}"
    names = [matrix.name.removesuffix(".weight") for layer, matrix in matrices if layer is not None]
    near = did_you_mean(target, dict.fromkeys(part for name in names for part in name.split(".")))
    last = dict.fromkeys(name.rpartition(".")[2] for name in names)
    return near or f"the matrices of a block are {', '.join(last)}"


def _others(arch: Architecture) -> Iterator[tuple[int | None, BlockParameter]]:
    """Yield (layer, parameter) for the parts of the model that cannot have an adapter; layer None: outside blocks."""
    for kind in arch.base.kinds:
        able = {each.name for each in matrices_of(kind.block, arch.base)}
        yield from ((kind.first, each) for each in kind.block.parameters(arch.base) if each.name not in able)
    for tensor in parameters(arch.base):
        if not name_in_block(tensor.name):
            yield None, BlockParameter(name=tensor.name, shape=tensor.shape, decays=tensor.decays, initial="normal")


def _layer_beyond(target: str, arch: Architecture) -> int | None:
    """Return a layer that a target names and that the model does not have; None if there is none."""
    head, _, rest = target.partition(".")
    numbers = [int(each) for each in rest.partition(".")[0].split("-") if each.isdecimal()] if head == "layers" else []
    return numbers[0] if numbers and numbers[0] >= arch.layers else None


def _wrong_module(arch: Architecture, patterns: tuple[str, ...]) -> tuple[str, str, str] | None:
    names = [tensor.name for tensor in parameters(arch.base)]
    for number, pattern in enumerate(patterns):
        if not any(covers(pattern, name) for name in names):
            return f"{TRAIN}.{number}", f"no parameter of the model is in `{pattern}`", instead(pattern, names, arch)
    return None


def _in_full_and_beside(arch: Architecture, patterns: tuple[str, ...]) -> tuple[str, str, str] | None:
    """Return the fault of a matrix that is trained in full and has an adapter: PEFT cannot represent it, and there is
    no frozen matrix to merge into."""
    matrices = dict.fromkeys(tensor.adapter for tensor in parameters(arch) if tensor.adapter)
    for number, pattern in enumerate(patterns):
        if (both := next((name for name in matrices if covers(pattern, name)), None)) is not None:
            message = f"`{pattern}` is trained in full, and {both.removesuffix('.weight')} in it has an adapter"
            return f"train.{number}", message, "leave it out of train, or its matrices out of targets and layers"
    return None


def _idle_target(arch: Architecture, targets: tuple[str, ...]) -> tuple[str, str, str] | None:
    """Return (setting, error, remedy) for a target whose matrices earlier targets already match; None if there is
    none."""
    matrices, before = all_matrices(arch), set[tuple[int | None, str]]()
    for number, target in enumerate(targets):
        meant = {(layer, matrix.name) for layer, matrix in matrices if is_target(target, layer, matrix)}
        if meant <= before:
            message = f"`{target}` matches nothing beyond the targets before it"
            return f"targets.{number}", message, f"remove `{target}`"
        before |= meant
    return None


def _idle_range(arch: Architecture) -> tuple[str, str, str] | None:
    """Return the fault of a range of blocks that extends past the model's last block."""
    assert arch.adapter is not None
    for setting in ("targets", "train"):
        for number, pattern in enumerate(getattr(arch.adapter, setting)):
            if (beyond := blocks_beyond(pattern, arch)) is not None:
                return f"{setting}.{number}", *beyond
    return None


def read_adapter(
    spec: Spec, adapter: Adapter, arch: Architecture, found: Findings, block: str = "adapter", rule: str = ADAPTER_RULE
) -> tuple[Adapter, PeftFolder | None, dict[str, str]]:
    """Return the adapter with the settings of its folder, the folder, and the reason for each setting. Without `from`,
    or if the folder cannot be read, return the adapter unchanged. arch: the model without adapter."""
    folder = adapter.from_
    if folder is None:
        return adapter, None, {}
    try:
        files = read_peft(folder, arch, adapter.peft_keys)
        given = planned(adapter, PlannedAdapter).of_peft(files, arch)
    except PeftUnreadable as problem:
        found.fail(rule, problem.code, f"{block}.from", str(problem), problem.hint)
        return adapter, None, {}
    reasons: dict[str, str] = {}
    values: dict[str, Any] = {}
    for name, (value, key) in given.items():
        path, written = f"{block}.{name}", getattr(adapter, name)
        origin = spec.origins.get(path)  # the spec of a plan has only those with a place
        if origin is None or origin.kind == "default" or isinstance(written, Auto):
            values[name] = value
            reasons[path] = f"`{key}` of {files.place(key)}"
        elif written != value and name not in adapter.free:
            message = f"`{name}` is {_short(written)}, and `{key}` of {files.place(key)} says {_short(value)}"
            found.fail(rule, "X523", path, message, "leave it out: the file says it")
            return adapter, None, {}
    read = evolve(adapter, **values)
    if (unfit := read.unfit_for_folder()) is not None:
        setting, message, hint = unfit
        found.fail(rule, "X435", f"{block}.{setting}", message, hint)
    return read, files, reasons


@checks("model.adapter_files", reads="model.* adapter adapter.* tokenizer.source")
@checks("model.adapter_files.*", reads="model.* task.{}.* tokenizer.source")
def check_adapter_files(
    arch: Architecture, files: PeftFolder, found: Findings, block: str = "adapter", rule: str = "model.adapter_files"
) -> None:
    """Check that every trained parameter has its tensor, and every tensor its parameter. arch: with this adapter
    only."""
    frozen = frozen_names(arch, ())
    trained = tuple(each for each in parameters(arch) if each.name not in frozen)
    try:
        assign_peft(arch, trained, files.files)
    except ValueError as problem:
        message = f"{files.folder}/{PEFT_WEIGHTS} does not fit the model: {problem}"
        found.fail(rule, "X524", f"{block}.from", message, "give an adapter of this model")
    else:
        count = len(files.files.tensors)
        found.passed(rule, f"{count:,} tensors of {files.folder} are assigned")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
