"""`adapter { from }`: the settings of an adapter as PEFT has saved it, and its files held against the model.

block: where an adapter stands in the spec, `adapter` or `task.sql.adapter`; rule: what its settings are checked by.
"""

import json
from typing import Any

from attrs import evolve

from xtrain.dsl.schema.adapters import Adapter
from xtrain.dsl.schema.setting import Auto
from xtrain.dsl.spec import Spec
from xtrain.planner.architecture import Architecture, parameters
from xtrain.planner.findings import Findings
from xtrain.planner.model.adapter import RULE
from xtrain.planner.model.frozen import frozen_names
from xtrain.planner.model.peft import PEFT_WEIGHTS, PeftFolder, PeftUnreadable, assign_peft, read_peft


def read_adapter(
    spec: Spec, adapter: Adapter, arch: Architecture, found: Findings, block: str = "adapter", rule: str = RULE
) -> tuple[Adapter, PeftFolder | None, dict[str, str]]:
    """The adapter with the settings of its folder, the folder, and why each setting is what it is. arch: the model
    without adapter. Without `from`, or where it cannot be read, the adapter as it is."""
    folder = adapter.from_
    if folder is None:
        return adapter, None, {}
    try:
        files = read_peft(folder, arch, adapter.peft_keys)
        given = adapter.of_peft(files, arch)
    except PeftUnreadable as problem:
        found.fail(rule, problem.code, f"{block}.from", str(problem), problem.hint)
        return adapter, None, {}
    reasons: dict[str, str] = {}
    values: dict[str, Any] = {}
    for name, (value, key) in given.items():
        path, written = f"{block}.{name}", getattr(adapter, name)
        if spec.origins[path].kind == "default" or isinstance(written, Auto):
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


def check_adapter_files(
    arch: Architecture, files: PeftFolder, found: Findings, block: str = "adapter", rule: str = "model.adapter_files"
) -> None:
    """Every trained parameter must have its tensor, and every tensor its parameter. arch: with this adapter alone."""
    frozen = frozen_names(arch, ())
    trained = tuple(each for each in parameters(arch) if each.name not in frozen)
    try:
        assign_peft(arch, trained, files.files)
    except ValueError as problem:
        message = f"{files.folder}/{PEFT_WEIGHTS} does not fit the model: {problem}"
        found.fail(rule, "X524", f"{block}.from", message, "give an adapter of this model")
    else:
        count = len(files.files.tensors)
        found.passed(rule, f"{count:,} tensors of {files.folder} have their place")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
