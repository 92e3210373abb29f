"""Annotations of the user's functions as the types that `convert` knows: what a spec may give for a parameter."""

import ast
from types import NoneType
from typing import Any, Final, Literal, Union, get_args, get_origin

_SCALARS: Final[dict[str, Any]] = {"int": int, "float": float, "str": str, "bool": bool, "None": NoneType}
_LISTS: Final = ("list", "tuple", "Sequence", "Iterable", "Collection", "List", "Tuple")
_DEEPEST: Final = 100  # far below what Python's stack takes
_MAPS: Final = ("dict", "Mapping", "Dict")


def parameter_type(annotation: ast.expr | None) -> Any:
    """The type an annotation stands for; Any where there is none, or where it means nothing to a spec."""
    kind = type_of(annotation)
    return Any if kind is NoneType else kind


def type_of(node: ast.expr | None) -> Any:
    """The type that an annotation, or a part of one, stands for."""
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            return type_of(expression(node.value))
        return NoneType if node.value is None else Any
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union([type_of(node.left), type_of(node.right)])
    if isinstance(node, ast.Subscript):
        return _generic(_name(node.value), _parts(node.slice))
    name = _name(node)
    if name in _LISTS:
        return tuple[Any, ...]
    if name in _MAPS:
        return dict[str, Any]
    return _SCALARS.get(name, Any)


def expression(text: str) -> ast.expr | None:
    """What a text is as an expression of Python; None if it is none."""
    try:
        found = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return found if nested_too_deeply(found) is None else None


def nested_too_deeply(node: ast.AST, most: int = _DEEPEST) -> ast.AST | None:
    """Return the outermost expression, or the statement, below `node` that has more than `most` levels."""
    waiting = [(node, node, 0)]
    while waiting:
        each, outermost, depth = waiting.pop()
        if depth > most:
            return outermost
        inside = isinstance(each, ast.expr)
        waiting += [(child, outermost if inside else child, depth + 1) for child in ast.iter_child_nodes(each)]
    return None


def annotated(annotation: ast.expr | None) -> list[ast.expr]:
    """What `Annotated` says beside the type."""
    if isinstance(annotation, ast.Subscript) and _name(annotation.value) == "Annotated":
        return _parts(annotation.slice)[1:]
    return []


def optional(kind: Any) -> Any:
    """The type with None, which a parameter with that default takes whatever its annotation says."""
    return _union([kind, NoneType])


def fits(kind: Any, value: Any) -> bool:
    """Whether a plain value (lists as tuples) is of a type."""
    if kind is Any or get_origin(kind) is Literal:
        return kind is Any or value in get_args(kind)
    if get_origin(kind) is Union:
        return any(fits(part, value) for part in get_args(kind))
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(fits(get_args(kind)[0], each) for each in value)
    if get_origin(kind) is dict:
        return isinstance(value, dict) and all(fits(get_args(kind)[1], each) for each in value.values())
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _generic(name: str, parts: list[ast.expr]) -> Any:
    if name == "Literal":
        words = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
        return Literal[tuple(words)] if len(words) == len(parts) else Any
    if name == "Optional":
        return _union([*map(type_of, parts), NoneType])
    if name == "Union":
        return _union([type_of(part) for part in parts])
    if name in _LISTS:
        items = {type_of(part) for part in parts if not (isinstance(part, ast.Constant) and part.value is ...)}
        return tuple[items.pop(), ...] if len(items) == 1 else tuple[Any, ...]
    if name in _MAPS:
        return dict[str, type_of(parts[-1])]
    if name in ("Annotated", "Final"):
        return type_of(parts[0])
    return Any


def _union(parts: list[Any]) -> Any:
    """One type with or without None; of several nothing is checked but that a spec can write the value."""
    found = set(parts) - {NoneType}
    if found == {int, float}:
        found = {float}
    if len(found) != 1 or Any in found:
        return Any
    return Union[found.pop(), None] if NoneType in parts else found.pop()  # noqa: UP007


def _name(node: ast.expr | None) -> str:
    """The last part of a name, `typing.Sequence` as `Sequence`."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _parts(node: ast.expr) -> list[ast.expr]:
    return list(node.elts) if isinstance(node, ast.Tuple) else [node]
