"""Settings of `adapter lora { … }` from PEFT's `adapter_config.json`, and back."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from xtrain.dsl.evaluation.values import is_number
from xtrain.plan.architecture import Architecture
from xtrain.plan.parameters import patterns_of, targets_of
from xtrain.plan.peft import PeftFolder, PeftMatrix, PeftUnreadable
from xtrain.text.units import plural


def settings_of_peft(folder: PeftFolder, arch: Architecture) -> dict[str, tuple[Any, str]]:
    """Return the settings of `adapter lora` for a PEFT folder, each with the key it comes from."""
    for key in ("r", "lora_alpha"):
        _positive(folder, key, folder.config.get(key, 8))
    rslora, dora = (_switch(folder, key) for key in ("use_rslora", "use_dora"))
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = folder.config.get(key, {})
        if not isinstance(patterns, dict):
            message = f"`{key}` is {json.dumps(patterns)} in {folder.place(key)}"
            raise PeftUnreadable("X522", message, "it must be an object with a number for each pattern")
        for pattern, value in patterns.items():
            _positive(folder, key, value)
            try:
                re.compile(pattern)
            except re.error as error:
                message = f"`{pattern}` is no pattern in `{key}` of {folder.place(key)}: {error}"
                raise PeftUnreadable("X522", message, "it must be a regular expression") from error
    for matrix in folder.matrices:
        _compare_rank(folder, matrix)
    ranks = {matrix.parameter: matrix.rank for matrix in folder.matrices}
    alphas = {matrix.parameter: _alpha(folder, matrix) for matrix in folder.matrices}
    rank, other_ranks = by_name(arch, ranks, folder.config.get("r", 8))
    alpha, other_alphas = by_name(arch, alphas, float(folder.config.get("lora_alpha", 8)))
    return {
        "rank": (rank, "r"),
        "ranks": (other_ranks, "rank_pattern"),
        "alpha": (alpha, "lora_alpha"),
        "alphas": (other_alphas, "alpha_pattern"),
        "scaling": ("rslora" if rslora else "standard", "use_rslora"),
        "dropout": (float(_dropout(folder)), "lora_dropout"),
        "dora": (dora, "use_dora"),
        "targets": (targets_of(arch, {matrix.parameter for matrix in folder.matrices}), "target_modules"),
        "train": (folder.full, "modules_to_save"),
    }


def _switch(folder: PeftFolder, key: str) -> bool:
    if isinstance(value := folder.config.get(key, False), bool):
        return value
    message = f"`{key}` is {json.dumps(value)} in {folder.place(key)}"
    raise PeftUnreadable("X522", message, "it must be true or false")


def _positive(folder: PeftFolder, key: str, value: Any) -> None:
    if not is_number(value) or value <= 0:
        message = f"`{key}` is {json.dumps(value)} in {folder.place(key)}"
        raise PeftUnreadable("X522", message, "it must be a number above 0")


def _dropout(folder: PeftFolder) -> float:
    share = folder.config.get("lora_dropout", 0.0)
    if not is_number(share) or not 0 <= share < 1:
        message = f"`lora_dropout` is {json.dumps(share)} in {folder.place('lora_dropout')}"
        raise PeftUnreadable("X522", message, "it must be a number from 0 up to, but not including, 1")
    return share


def _compare_rank(folder: PeftFolder, matrix: PeftMatrix) -> None:
    module = matrix.modules[0]
    found = folder.pattern("rank_pattern", module)
    key, said = ("r", folder.config.get("r", 8)) if found is None else ("rank_pattern", found)
    if matrix.rank != said:
        rows = f"lora_A of {module} has {plural(matrix.rank, 'row')}"
        message = f"{rows}, and `{key}` in {folder.place(key)} says {json.dumps(said)}"
        raise PeftUnreadable("X522", message, "copy both files of the folder again: they belong to different adapters")


def _alpha(folder: PeftFolder, matrix: PeftMatrix) -> float:
    own = {folder.pattern("alpha_pattern", module) for module in matrix.modules}
    if len(own) > 1:
        message = f"experts of {matrix.parameter} have different alphas in {folder.place('alpha_pattern')}"
        raise PeftUnreadable("X522", message, "give all experts of a layer the same")
    found = own.pop()
    return float(folder.config.get("lora_alpha", 8) if found is None else found)


def by_name(arch: Architecture, values: Mapping[str, Any], usual: Any) -> tuple[Any, dict[str, Any]]:
    """Return the most common value (`usual` if any matrix has it), and name patterns for the other values."""
    if usual not in values.values():
        usual = Counter(values.values()).most_common(1)[0][0]
    others: dict[str, Any] = {}
    for value in dict.fromkeys(values.values()):
        if value != usual:
            names = {name for name, each in values.items() if each == value}
            others |= dict.fromkeys(patterns_of(arch, names), value)
    return usual, others


def peft_values(own: Mapping[str, tuple[int, float]], usual: tuple[int, float]) -> dict[str, Any]:
    """Return PEFT's keys for the (rank, alpha) of every module, with patterns for those that differ from `usual`."""
    rank, alpha = usual
    return {
        "r": rank,
        "rank_pattern": _patterns({module: each for module, (each, _) in own.items()}, rank),
        "lora_alpha": _plain(alpha),
        "alpha_pattern": _patterns({module: _plain(each) for module, (_, each) in own.items()}, _plain(alpha)),
    }


def _patterns(values: Mapping[str, Any], usual: Any) -> dict[str, Any]:
    """Return PEFT's patterns of values that differ from the usual one, by the last part of module names if all modules
    with that ending share the value."""
    last: dict[str, set[Any]] = {}
    for module, value in values.items():
        last.setdefault(module.rpartition(".")[2], set()).add(value)
    found: dict[str, Any] = {}
    for module, value in values.items():
        if value != usual:
            end = module.rpartition(".")[2]
            found[end if len(last[end]) == 1 else re.escape(module)] = value
    return found


def _plain(number: float) -> float:
    """Return a whole number as an integer."""
    return int(number) if number == int(number) else number
