"""`xtrain docs parts.py`: what a module that `use` names declares, read without running it."""

from pathlib import Path
from typing import Any, Union, get_args, get_origin

from xtrain.dsl.diagnostics.diagnostic import Diagnostics
from xtrain.dsl.diagnostics.source import SourceText
from xtrain.dsl.schema.component import COMPUTED
from xtrain.dsl.spec_text import value_text
from xtrain.dsl.user_parts.kinds import PART_KINDS
from xtrain.dsl.user_parts.reader import Declared, read_parts
from xtrain.dsl.user_parts.signatures import REQUIRED, Parameter, Weight

_WORDS = {int: "whole number", float: "number", str: "string", bool: "true or false"}


def own_functions(path: str, diagnostics: Diagnostics) -> str:
    """A paragraph for each function with a decorator of xtrain. What is wrong with the file is reported.

    Raises OSError, and UnicodeDecodeError.
    """
    source = SourceText.from_bytes(path, Path(path).read_bytes())
    found = read_parts(source, diagnostics) or []
    if not found and not diagnostics.has_errors:
        return f"{path} declares nothing that a spec can use\n"
    return "\n".join(_function(each, path) for each in found)


def _function(declared: Declared, path: str) -> str:
    about = PART_KINDS[declared.kind]
    lines = [f"{declared.name}  {declared.kind}, of {path}:{declared.span.line}", ""]
    lines += [f"  {declared.does}", ""] if declared.does else []
    lines.append(f"  {about.noun} {about.chosen.replace('NAME', declared.name).replace('name', declared.name)}")
    lines += [f"  {name} = {_given(value)}" for name, value in declared.options.items() if value]
    lines += ["", *map(_weight, declared.weights)] if declared.weights else []
    lines += (
        ["", *(f"  {each.name}  {_parameter(each)}" for each in declared.parameters)] if declared.parameters else []
    )
    return "\n".join(lines) + "\n"


def _given(value: Any) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _parameter(parameter: Parameter) -> str:
    """`number; default 0.9`."""
    if parameter.default is REQUIRED:
        default = "required"
    else:
        default = "default: computed by the code"
        if parameter.default is not COMPUTED:
            default = f"default {value_text(parameter.default)}"
    bounds = f", {parameter.check.words}" if parameter.check is not None else ""
    return f"{_type(parameter.type)}{bounds}; {default}" + (f"  {parameter.doc}" if parameter.doc else "")


def _weight(weight: Weight) -> str:
    cut = f"cut by {weight.cut}" if weight.cut else "whole"
    return f"  {weight.name}  weight {' × '.join(map(str, weight.shape))}, {cut}, {weight.initial}"


def _type(kind: Any) -> str:
    if get_origin(kind) is Union:
        return " or ".join("none" if part is type(None) else _type(part) for part in get_args(kind))
    if get_origin(kind) is tuple:
        return "list"
    if get_origin(kind) is dict:
        return "map"
    if kind in _WORDS:
        return _WORDS[kind]
    words = get_args(kind)
    return " or ".join(f"`{word}`" for word in words) if words else "any value"
