"""`adapter NAME { … }` held against the model that it is added to."""

from collections.abc import Iterator, Sequence
from typing import Final

from ...dsl.diagnostics.suggest import did_you_mean
from ...dsl.spec import Spec
from ..architecture import EMBEDDING, HEAD, Architecture, BlockParameter, name_in_block, parameters
from ..findings import Findings
from ..units import plural
from .frozen import covers
from .targets import ALL_LINEAR, all_matrices, is_target, matrices_of, means

RULE: Final = "model.adapter"
TARGETS: Final = "adapter.targets"
TRAIN: Final = "adapter.train"


def check_adapter(spec: Spec, arch: Architecture, found: Findings) -> None:
    """Every target must mean a matrix that an adapter can be of, and every name of `train` something of the model."""
    adapter = arch.adapter
    if adapter is None:
        return
    if spec.model.frozen:
        message = "an adapter leaves the whole model as it is, so `frozen` has nothing to say"
        found.fail(RULE, "X435", "model.frozen", message, "remove it; what is trained beside the adapter is `train`")
        return
    if arch.router_bias_speed > 0:
        message = "routers would move their balance biases, which are part of the model and not of the adapter"
        found.fail(RULE, "X435", "model.router.bias_speed", message, "use bias_speed 0")
        return
    if (wrong := _wrong_target(arch, adapter.targets) or _wrong_module(arch, adapter.train)) is not None:
        path, message, hint = wrong
        found.fail(RULE, "X435", path, message, hint)
        return
    if (unfit := adapter.unfit(arch)) is not None:
        setting, message, hint = unfit
        found.fail(RULE, "X435", f"adapter.{setting}", message, hint)
        return
    if (idle := _idle_target(arch, adapter.targets)) is not None:
        message = f"`{idle}` means nothing that the targets before it do not mean"
        found.warn(RULE, "W401", TARGETS, message, f"remove `{idle}`")
        return
    count = len({tensor.adapter for tensor in parameters(arch)} - {""})
    found.passed(RULE, f"{plural(count, 'matrix')} with an adapter")


def _wrong_target(arch: Architecture, targets: tuple[str, ...]) -> tuple[str, str, str] | None:
    """The setting at fault, what is wrong, and what to do."""
    if not targets:
        return TARGETS, "no matrix has an adapter", f"name matrices, or leave targets out: {ALL_LINEAR}"
    matrices = all_matrices(arch)
    for target in targets:
        if any(is_target(target, layer, matrix) for layer, matrix in matrices):
            continue
        if target == ALL_LINEAR:
            return TARGETS, "the model has no matrices that an adapter can be of", "train it in full"
        return TARGETS, f"no matrix of the model is meant by `{target}`", _instead(target, arch, matrices)
    return None


def _instead(target: str, arch: Architecture, matrices: Sequence[tuple[int, BlockParameter]]) -> str:
    """What to write in place of a target that means nothing."""
    experts = next((matrix for layer, matrix in matrices if means(target, layer, matrix.name)), None)
    if experts is not None:
        module = experts.owner.rpartition(".")[2]
        return f"it means routed experts alone, which are named by their module: write `{module}.{target}`"
    for layer, parameter in _others(arch):
        if not means(target, layer, parameter.name):
            continue
        what = {EMBEDDING: "the embedding", HEAD: "the head"}.get(parameter.owner, f"`{parameter.owner}`")
        what = "the router" if parameter.router else what
        pattern = parameter.owner if layer is None else f"layers.*.{parameter.owner}"
        return f'{what} can have no adapter; `train = ["{pattern}"]` trains it in full'
    if (layer := _layer_beyond(target, arch)) is not None:
        return f"there is no block {layer}: the blocks are 0 to {arch.layers - 1}"
    names = [matrix.name.removesuffix(".weight") for _, matrix in matrices]
    near = did_you_mean(target, dict.fromkeys(part for name in names for part in name.split(".")))
    last = dict.fromkeys(name.rpartition(".")[2] for name in names)
    return near or f"the matrices of a block are {', '.join(last)}"


def _others(arch: Architecture) -> Iterator[tuple[int | None, BlockParameter]]:
    """What of the model no adapter can be of, as parameters of a block; layer None: they are in none."""
    for kind in arch.base.kinds:
        able = {each.name for each in matrices_of(kind.block, arch.base)}
        yield from ((kind.first, each) for each in kind.block.parameters(arch.base) if each.name not in able)
    for tensor in parameters(arch.base):
        if not name_in_block(tensor.name):
            yield None, BlockParameter(name=tensor.name, shape=tensor.shape, decays=tensor.decays, initial="normal")


def _layer_beyond(target: str, arch: Architecture) -> int | None:
    """A layer that a target names and that the model does not have."""
    head, _, rest = target.partition(".")
    numbers = [int(each) for each in rest.partition(".")[0].split("-") if each.isdecimal()] if head == "layers" else []
    return numbers[0] if numbers and numbers[0] >= arch.layers else None


def _wrong_module(arch: Architecture, patterns: tuple[str, ...]) -> tuple[str, str, str] | None:
    names = [tensor.name for tensor in parameters(arch.base)]
    for pattern in patterns:
        if not any(covers(pattern, name) for name in names):
            near = did_you_mean(pattern, dict.fromkeys(name.partition(".")[0] for name in names))
            return TRAIN, f"no parameter of the model is in `{pattern}`", near or "name modules as the plan does"
    return None


def _idle_target(arch: Architecture, targets: tuple[str, ...]) -> str | None:
    """A target whose matrices those before it mean already."""
    matrices, before = all_matrices(arch), set[tuple[int, str]]()
    for target in targets:
        meant = {(layer, matrix.name) for layer, matrix in matrices if is_target(target, layer, matrix)}
        if meant <= before:
            return target
        before |= meant
    return None
