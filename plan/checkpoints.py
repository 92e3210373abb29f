"""Checkpoints: names in a folder, the description that each stores of itself, and reasons why it does not fit a plan.

The runtime writes `checkpoint_contents` into every checkpoint and refuses one with `mismatches`; `xtrain diff` applies
both to two plans. The loader of the run checks that rows hold the same text.
"""

import re
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, Final, Literal, get_args

from attrs import evolve

from xtrain.dsl.schema.adapters import ADAPTERS
from xtrain.dsl.schema.model import FAMILIES, Model, Resuming
from xtrain.dsl.schema.precision import base_of
from xtrain.dsl.schema.setting import resuming_of
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture, ParameterSpec, buffers, parameters
from xtrain.plan.groups import ParameterGroups
from xtrain.plan.mesh import base_of_plan
from xtrain.plan.plan import Plan
from xtrain.regular_files import read_regular

Pointer = Literal["latest", "best", "model"]
POINTERS: Final[tuple[Pointer, ...]] = get_args(Pointer)
ALIAS: Final = ".pt"
FULL: Final = re.compile(r"ckpt-s(\d{12})")
WEIGHTS: Final = re.compile(r"model-s(\d{12})")
EPOCH: Final = re.compile(r"epoch-(\d{1,9})")  # not a file: the sidecar of a checkpoint stores the epoch that has ended
STATE: Final = "state.json"
BALANCE: Final = "e_score_correction_bias"  # tensor with the load-balancing biases of a router
FOLDER: Final = "checkpoints"  # folder of a run

# full: a run can resume from it. weights: weights only. later: a run or folder without checkpoints so far.
Found = Literal["full", "weights", "later", "missing", "other"]


def look_at(path: Path) -> Found:
    """Return what a path holds that should be a checkpoint: the checkpoint itself, a pointer, a folder of checkpoints
    or a run."""
    try:
        if not path.exists():
            return look_at(path.parent) if EPOCH.fullmatch(path.name) else "missing"
        if path.is_file():
            return _file(path)
        names = [each.name for each in path.iterdir()]
        if FULL.fullmatch(path.name) or WEIGHTS.fullmatch(path.name):
            return _kind([path.name]) if names else "later"
        inside = [each.name for each in (path / FOLDER).iterdir()] if FOLDER in names else []
        found = _kind([*names, *inside])
        return "later" if found == "other" and (not names or FOLDER in names or "plan.json" in names) else found
    except (OSError, ValueError):  # nothing can be said about this path here
        return "missing"


def _file(path: Path) -> Found:
    if path.suffix == ALIAS:
        return _kind([path.parent.name]) if path.stem not in POINTERS else _pointed(path.with_suffix(""))
    return _pointed(path) if path.name in POINTERS else "other"


def _pointed(pointer: Path) -> Found:
    return _kind([read_regular(pointer, 1000).decode(errors="replace").strip()]) if pointer.is_file() else "other"


def _kind(names: list[str]) -> Found:
    """Return the kind of the best checkpoint among these names."""
    if any(FULL.fullmatch(name) for name in names):
        return "full"
    return "weights" if any(WEIGHTS.fullmatch(name) for name in names) else "other"


# Significant bits of a number, including the leading one.
PRECISION: Final = {"bf16": 8, "fp32": 24, "fp64": 53}
# Set for a checkpoint that holds trained parameters next to a base, without the base.
ADAPTER_ALONE: Final = "adapter_alone"
_OF_ADAPTER: Final = (
    "the checkpoint holds an adapter without the model under it; `xtrain merge` writes both as one model, and "
    "`xtrain export --adapter` a folder for `adapter { from }`"
)
_WITHOUT_ADAPTER: Final = "the checkpoint has no adapter; to add one to its weights, use checkpoint.pretrained"
# State of the loader: name → setting, and the effect of another value.
STREAM: Final = {
    "capacity": ("batch.sequence", "rows have another length"),
    "align": ("collate.pack.align", "documents are packed into other rows"),
    "seed": ("experiment.seed", "rows are in another order, and other documents are held out"),
}


@frozen(kw_only=True)
class CheckpointMismatch:
    """Reason why a run cannot resume from a checkpoint. path: the setting that it depends on."""

    path: str
    text: str

    def __str__(self) -> str:
        return f"{self.path} {self.text}"


def checkpoint_contents(plan: Plan) -> dict[str, Any]:
    """Return the description that a checkpoint of this plan stores of its contents, as JSON. The loader adds its own
    state."""
    build, loader, arch = plan.node("setup.build_model").args, plan.node("setup.loader").args, plan.architecture
    saved = saved_parameters(plan)
    return {
        "tensors": {tensor.name: list(tensor.shape) for tensor in saved},
        "buffers": {each.name: list(each.shape) for each in buffers(arch)},
        "model": arch.identity,
        "params": build["params"],
        **({ADAPTER_ALONE: True} if base_names(plan) else {}),
        **({"frozen": frozen} if (frozen := [each.name for each in saved if not each.trained]) else {}),
        **({"base": base.args()} if (base := base_of_plan(plan)) is not None else {}),
        "optimizer": ParameterGroups.of(plan).title(),
        "loader": {
            "capacity": loader["sequence"],
            "align": alignment(plan),
            "seed": loader["seed"],
        },
    }


def base_names(plan: Plan) -> frozenset[str]:
    """Return the parameters that no checkpoint of a plan holds: the frozen model under an adapter. A resume reads it
    again from its origin, and its content must be the same."""
    return frozenset(base_sizes(plan))


def base_sizes(plan: Plan) -> dict[str, int]:
    """Return parameter → its numbers, or its bytes of codes; the scales of codes have names of their own."""
    if all(node.op != "setup.base" for node in plan.nodes):
        return {}
    base, found = base_of_plan(plan), dict[str, int]()
    for tensor in plan.parameters.tensors:
        if not tensor.trained and not tensor.adapter:
            stored = tensor.quantised and base is not None
            found[tensor.name] = prod(base.stored_shape(tensor.shape)) if stored and base else tensor.size
            if stored and base and (scales := base.scales_shape(tensor.shape)):
                found[f"{tensor.name}_scales"] = prod(scales)
    return found


def saved_parameters(plan: Plan) -> tuple[ParameterSpec, ...]:
    """Return the parameters that checkpoints of a plan hold."""
    base = base_names(plan)
    return tuple(tensor for tensor in plan.parameters.tensors if tensor.name not in base)


def origin_contents(plan: Plan, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a checkpoint whose weights alone a plan can start from: the model without adapter. If
    the plan has a reward head and `saved` does not, it has the head of a language model; the reward head is then
    drawn."""
    arch = plan.architecture.base
    model = saved.get("model", {})
    if not arch.has_logits and model.get("head") != "reward":
        arch = evolve(arch, head="vocabulary", tie_embeddings=model.get("tie_embeddings", False))
    whole = {tensor.name: list(tensor.shape) for tensor in parameters(arch)}
    contents = {name: value for name, value in checkpoint_contents(plan).items() if name != ADAPTER_ALONE}
    return {**contents, "tensors": whole, "model": arch.identity}


def alignment(plan: Plan) -> int:
    """Return the number of positions by which padded document lengths are divisible."""
    return plan.node("collate.pack").args["align"]


def mismatches(saved: dict[str, Any], planned: dict[str, Any]) -> list[CheckpointMismatch]:
    """Return the reasons why a checkpoint described by `saved` does not fit a plan with `planned`.

    Fields that an old checkpoint lacks count as equal.
    """
    if (found := _alone(saved, planned)) is not None:
        return [found]
    frozen = _frozen(set(saved.get("frozen", [])), set(planned.get("frozen", [])))
    base = [] if saved.get("base") else _base(saved, planned)  # otherwise a mismatch of weights
    saved = {**planned, **saved}
    found = [*weight_mismatches(saved, planned), *frozen, *base]
    before, after = saved["params"], planned["params"]
    if PRECISION[after] < PRECISION[before]:
        text = f"{before} → {after}: parameters and moments would be rounded"
        found.append(CheckpointMismatch(path="precision.params", text=text))
    if saved["optimizer"] != planned["optimizer"]:
        text = f"{saved['optimizer']} → {planned['optimizer']}: the optimizer states are not compatible"
        found.append(CheckpointMismatch(path="optimizer.kind", text=text))
    for name, (path, meaning) in STREAM.items():
        before, after = saved["loader"].get(name), planned["loader"][name]
        if before != after:
            found.append(CheckpointMismatch(path=path, text=f"{before} → {after}: {meaning}"))
    return found


def _alone(saved: Mapping[str, Any], planned: Mapping[str, Any]) -> CheckpointMismatch | None:
    """Return a mismatch if one side is an adapter without the model under it and the other is not."""
    alone = bool(saved.get(ADAPTER_ALONE))
    if alone == bool(planned.get(ADAPTER_ALONE)):
        return None
    return CheckpointMismatch(path="adapter", text=_OF_ADAPTER if alone else _WITHOUT_ADAPTER)


def _frozen(before: set[str], after: set[str]) -> list[CheckpointMismatch]:
    """Return mismatches between the frozen parameters of a state and of a plan."""
    for names, text in (
        (before - after, "frozen in the checkpoint and trained here: it has no optimizer state for it"),
        (after - before, "trained in the checkpoint and frozen here"),
    ):
        if names:
            first = min(names)
            more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
            text = f"{first}{more}: {text}; start from its weights alone, with checkpoint.pretrained"
            return [CheckpointMismatch(path="model.frozen", text=text)]
    return []


def _base(saved: Mapping[str, Any], planned: Mapping[str, Any]) -> list[CheckpointMismatch]:
    """Return mismatches of matrices that are stored in codes."""
    before, after = saved.get("base"), planned.get("base")
    if before == after:
        if not before or saved.get("frozen") == planned.get("frozen"):
            return []
        text = f"other parameters are frozen, and so other matrices are stored as {base_of(before).words()}"
        return [CheckpointMismatch(path="model.frozen", text=text)]
    words = [base_of(each).words() if each else "none" for each in (before, after)]
    text = f"{words[0]} → {words[1]}: matrices are stored in another way; start from "
    text += "a folder that `xtrain export --dequantise` writes" if before else "its weights alone, with "
    text += "" if before else "checkpoint.pretrained"
    return [CheckpointMismatch(path="precision.base", text=text)]


def weight_mismatches(saved: dict[str, Any], planned: dict[str, Any]) -> list[CheckpointMismatch]:
    """Return the reasons why a checkpoint's weights alone do not fit. Their format may differ, except for matrices in
    codes."""
    if (alone := _alone(saved, planned)) is not None:
        return [alone]
    codes = _base(saved, planned) if saved.get("base") else []
    saved = {**planned, **saved}
    found = [*_model(saved, planned), *codes]
    kinds, others = ({name.rpartition(".")[2] for name in each["buffers"]} for each in (saved, planned))
    if kinds != others:
        before, after = (_spell(each["model"]["router_bias_speed"]) for each in (saved, planned))
        has, lacks = ("the checkpoint has", "the plan") if kinds > others else ("the plan has", "the checkpoint")
        path = "model.router.bias_speed"
        if before == after:  # for families that always have them
            path, before, after = "model.family", saved["model"]["family"], planned["model"]["family"]
        names = kinds ^ others
        what = "load-balancing biases of routers" if names == {BALANCE} else f"`{min(names)}` in blocks"
        text = f"{before} → {after}: {has} {what}, and {lacks} has none"
        found.append(CheckpointMismatch(path=path, text=text))
    return found


def _model(saved: dict[str, Any], planned: dict[str, Any]) -> list[CheckpointMismatch]:
    alike = _adapted(saved["model"]) == _adapted(planned["model"])
    before, after = (_settings(each["model"], each_of_adapter=alike) for each in (saved, planned))
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    changed = [name for name in changed if name not in ("family", "user", "block")]
    meaning = resuming(before, after)
    found = []
    shapes = saved["tensors"] != planned["tensors"]
    if shapes:
        causes = [name for name in changed if meaning(name) in ("shape", "loss", "elsewhere")]
        causes = causes or [name for name in changed if meaning(name) == "width"]
        causes = [name for name in causes if meaning(name) == "shape"] or causes
        if not causes and before["family"] != after["family"]:
            causes = ["family"]
        values = ", ".join(f"{name} {_spell(before.get(name))} → {_spell(after.get(name))}" for name in causes)
        path = setting_path(causes[0]) if len(causes) == 1 else _common(causes)
        values = values.removeprefix(f"{causes[0]} ") if len(causes) == 1 else values
        difference = tensor_difference(saved["tensors"], planned["tensors"])
        found.append(CheckpointMismatch(path=path, text=f"{values}: {difference}" if values else difference))
    elif not _same_block(saved["model"], planned["model"]):
        text = f"{before['family']} → {after['family']}: the same weights would give other results"
        if before["family"] == after["family"]:
            text = f"{after['family']} computes something else: the same weights would give other results"
        found.append(CheckpointMismatch(path="model.family", text=text))
    for name in changed:
        if meaning(name) == "meaning" or (meaning(name) == "width" and not shapes):
            text = f"{_change(before.get(name), after.get(name))}: the same weights would give other results"
            found.append(CheckpointMismatch(path=setting_path(name), text=text))
    return found


def _settings(model: Mapping[str, Any], *, each_of_adapter: bool) -> dict[str, Any]:
    """Return name → value of a model's settings. `rope` is empty without scaling. Adapter settings are named
    `adapter.rank`, of tasks `task.sql.adapter.rank`; without `each_of_adapter`, `adapter` is the kind of the
    adapter."""
    adapter: dict[str, Any] = {"adapter": _adapted(model)}
    if each_of_adapter:
        given = {"": model.get("adapter", {})}
        if "tasks" in given[""]:
            given = {f"task.{task}.": own for task, own in given[""]["tasks"].items()}
        adapter = {f"{of}adapter.{name}": value for of, own in given.items() for name, value in own.items()}
    return {
        "rope": {},
        "head": "vocabulary",
        **{name: value for name, value in model.items() if name != "adapter"},
        **adapter,
    }


def _adapted(model: Mapping[str, Any]) -> str | None:
    """Return the kind of a model's adapter; `tasks` if there are several."""
    adapter = model.get("adapter", {})
    return "tasks" if "tasks" in adapter else adapter.get("kind")


def _of_adapter(name: str) -> bool:
    """Return True if a setting belongs to an adapter."""
    return name.startswith(("adapter", "task."))


def _common(causes: list[str]) -> str:
    """Return the path that several settings have in common."""
    if not all(map(_of_adapter, causes)):
        return "model"
    blocks = {name.rpartition(".adapter.")[0] for name in causes}
    return "adapter" if blocks == {""} else f"{blocks.pop()}.adapter" if len(blocks) == 1 else "task"


def resuming(before: Mapping[str, Any], after: Mapping[str, Any]) -> Callable[[str], str]:
    """Return a function that gives the effect of a changed setting on a checkpoint, as declared by the families and
    adapters of both models."""
    families = [family for model in (before, after) if (family := _family(model)) is not None]
    known = {"head": "shape", **{name: what for family in families for name, what in resuming_of(family).items()}}
    others: list[Resuming] = [family.other for family in families if family.other != Model.other]
    other = others[0] if others else Model.other
    kinds = {(key, each) for model in (before, after) for key, each in model.items() if key.endswith("adapter.kind")}
    for key, kind in kinds:
        if kind in ADAPTERS:
            known |= {f"{key.removesuffix('kind')}{name}": what for name, what in resuming_of(ADAPTERS[kind]).items()}
    return lambda name: known.get(name, "shape" if _of_adapter(name) else other)


def _family(model: Mapping[str, Any]) -> type[Model] | None:
    return FAMILIES.of_users if "user" in model else FAMILIES.get(model["family"])


def _same_block(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Return True if blocks of two models with the same parameters compute the same; other numbers are compared one by
    one."""
    if before["family"] == after["family"] and before.get("block") == after.get("block"):
        return True
    if _family(before) is None or "code" in before or "code" in after:
        return False
    one, other = (Architecture.from_values(model) for model in (before, after))
    return one.kinds == other.kinds


def setting_path(name: str) -> str:
    """Return the setting that a field of an architecture comes from."""
    if name == "head":
        return "loss"
    return name if _of_adapter(name) else f"model.{name.replace('router_', 'router.')}"


def _spell(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_spell(each)}" for name, each in value.items()) or "none"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _change(before: Any, after: Any) -> str:
    """Return the text of a change: of two mappings the keys alone that differ."""
    if not (isinstance(before, Mapping) and before and isinstance(after, Mapping) and after):
        return f"{_spell(before)} → {_spell(after)}"
    names = (name for name in {**before, **after} if before.get(name) != after.get(name))
    return ", ".join(f"{name} {_change(before.get(name), after.get(name))}" for name in names)


def tensor_difference(saved: dict[str, list[int]], planned: dict[str, list[int]]) -> str:
    """Return text on the parameters that are on one side only or differ in shape; it names two of each kind."""
    parts = []
    for names, words in (
        ([n for n in planned if n not in saved], "not in the checkpoint"),
        ([n for n in saved if n not in planned], "in the checkpoint only"),
    ):
        if names:
            parts.append(f"{_named(names)} {'is' if len(names) == 1 else 'are'} {words}")
    other = [n for n in saved if n in planned and saved[n] != planned[n]]
    if other:
        first = other[0]
        more = f", and {len(other) - 1} more {'differs' if len(other) == 2 else 'differ'}" if len(other) > 1 else ""
        parts.append(f"{first} is {_shape(saved[first])} there and {_shape(planned[first])} here{more}")
    return "; ".join(parts)


def _named(names: list[str]) -> str:
    shown = ", ".join(names[:2])
    return f"{shown} and {len(names) - 2} more" if len(names) > 2 else shown


def _shape(shape: list[int]) -> str:
    return " × ".join(map(str, shape))
